"""Facts about a machine and about the connection between two: the data in `facts.json`, and how it is read.

None means not known. Keys of newer versions are ignored.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from potluck import checked
from potluck.bounds import Finite, Many, Named, Natural, Text, Whole
from potluck.errors import UserError
from potluck.spec.probed import ProbedPath

FORMAT = 1
_AGAIN = "make the file again: potluck doctor --save FILE"

ETHERNET, WIFI, THUNDERBOLT, VPN = "ethernet", "wifi", "thunderbolt", "vpn"
CONTAINER, LOOPBACK, OTHER = "container", "loopback", "other"

CONNECTED, REFUSED, TIMEOUT, NO_ROUTE = "connected", "refused", "timeout", "no route"
DENIED, UNKNOWN_NAME, FAILED = "denied", "unknown name", "failed"


class Interface(Struct, frozen=True, kw_only=True):
    """One network interface."""

    name: Text
    kind: Text = OTHER
    """ethernet, wifi, thunderbolt, vpn, container, loopback, other."""
    up: bool = True
    addresses: Many[Text] = ()
    """IPv4 and IPv6, each with its prefix: 192.168.1.5/24."""
    mtu: Natural | None = None
    speed_mbit: Whole | None = None


class Route(Struct, frozen=True, kw_only=True):
    """The route of packets to an address."""

    to: Text
    interface: Text | None
    source: Text
    neighbour: Text | None = None
    """State of the address in the neighbour table: reachable or failed; None if it is not on this network."""


class HostsLine(Struct, frozen=True, kw_only=True):
    """One line of the hosts file."""

    address: Text
    names: Many[Text]


class Lookup(Struct, frozen=True, kw_only=True):
    """One query to the resolver: the addresses of a name, or the name of an address."""

    asked: Text
    seconds: Finite
    answers: Many[Text] = ()
    error: Text = ""
    finished: bool = True
    """False if there was no answer within `seconds`."""


class Port(Struct, frozen=True, kw_only=True):
    """A port of this machine that is needed, and the process that uses it."""

    number: Natural
    free: bool
    holder: Text | None = None
    wanted_by: Text = ""
    """What needs it: --port, MASTER_PORT, torchrun's default."""


class Firewall(Struct, frozen=True, kw_only=True):
    """One firewall and what it does with connections from outside."""

    tool: Text
    """ufw, firewalld, nftables, iptables, macos, windows."""
    blocks: bool | None
    """Whether incoming connections are dropped unless a rule allows them."""
    allowed: Many[Text] = ()
    """Ports or ranges that rules allow in: 22, 6000-6010."""
    denied: Many[Text] = ()
    """Ports or ranges that rules block."""
    out_blocks: bool = False
    """Whether outgoing connections are dropped unless a rule allows them."""
    out_allowed: Many[Text] = ()
    out_denied: Many[Text] = ()
    how: Text = ""
    """The command whose output shows this."""


class Ipv6(Struct, frozen=True, kw_only=True):
    """Which parts of IPv6 work."""

    sockets: bool = True
    """Whether IPv6 sockets can be created."""
    loopback: bool = True
    """Whether ::1 can be listened on."""
    switched_off: bool = False
    """Whether it is disabled by a setting (disable_ipv6)."""


class Cpu(Struct, frozen=True, kw_only=True):
    name: Text = ""
    physical: Natural = 1
    logical: Natural = 1
    usable: Natural = 1
    """Physical cores that this process may use, within affinity and quota."""


class Disk(Struct, frozen=True, kw_only=True):
    """The file system of the folder that holds runs."""

    path: Text
    free_bytes: Natural | None = None
    writable: bool = True
    error: Text = ""


class Power(Struct, frozen=True, kw_only=True):
    on_battery: bool | None = None
    percent: Finite | None = None
    sleeps_after_s: Finite | None = None
    """Idle seconds until the system sleeps by itself; 0: never."""
    how: Text = ""


class Gpu(Struct, frozen=True, kw_only=True):
    vendor: Text
    """nvidia, amd, apple."""
    name: Text = ""
    driver: Text = ""
    how: Text = ""


class Torch(Struct, frozen=True, kw_only=True):
    version: Text | None = None
    cuda_build: Text | None = None
    hip_build: Text | None = None
    cuda_available: bool | None = None
    mps_built: bool | None = None
    mps_available: bool | None = None
    error: Text = ""


class Orphan(Struct, frozen=True, kw_only=True):
    """A training process whose parent has ended."""

    pid: Natural
    command: Text
    age_s: Finite
    why: Text
    """The evidence that nobody waits for it."""
    surely: bool = False
    """Whether the process itself names its owner, and that owner is gone."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    path: Text
    whole: bool
    why: Text = ""


class SshHost(Struct, frozen=True, kw_only=True):
    """One attempt to log in without a password."""

    host: Text
    status: Whole | None
    """Exit status of ssh; None if it did not end in time or ssh is not installed."""
    said: Text = ""
    python: Text = ""
    """Output of Python on that machine, if it ran."""


class Facts(Struct, frozen=True, kw_only=True):
    """One machine."""

    name: Text
    platform: Text
    """linux, darwin, win32."""
    system: Text = ""
    """The version as the system describes it."""
    architecture: Text = ""
    translated: bool = False
    """Whether this is an Intel Python on an Apple processor (Rosetta)."""
    wsl: bool = False
    python: Text = ""
    potluck: Text = ""
    protocol: Natural = 0
    torch: Torch = Torch()
    interfaces: Many[Interface] = ()
    default_address: Text | None = None
    """The address that `potluck host` listens on: that of the default route, if there is one."""
    default_route: bool = True
    hosts: Many[HostsLine] = ()
    hosts_path: Text = "/etc/hosts"
    lookups: Many[Lookup] = ()
    environment: Named[Text] = {}
    """Environment variables about networks and threads; no secrets."""
    ports: Many[Port] = ()
    firewalls: Many[Firewall] = ()
    ipv6: Ipv6 = Ipv6()
    cpu: Cpu = Cpu()
    memory_bytes: Natural | None = None
    memory_free_bytes: Natural | None = None
    model_parameters: Natural | None = None
    """Parameters of the model to be trained, if given with --parameters."""
    disk: Disk | None = None
    power: Power = Power()
    gpus: Many[Gpu] = ()
    orphans: Many[Orphan] = ()
    checkpoints: Many[Checkpoint] = ()
    """Checkpoints of the run, newest first."""
    ssh: Many[SshHost] = ()

    def interface(self, name: str | None) -> Interface | None:
        return next((i for i in self.interfaces if i.name == name), None)


class Reach(Struct, frozen=True, kw_only=True):
    """One attempt to open a TCP connection."""

    machine: Text
    """The machine that tried."""
    address: Text
    port: Natural
    outcome: Text
    """connected, refused, timeout, no route, denied, unknown name, failed."""
    errno: Whole | None = None
    seconds: Finite = 0.0
    wanted: bool = True
    """False for a port where nothing needs to listen, tried only to see whether the machine answers."""
    route: Route | None = None


class Transfer(Struct, frozen=True, kw_only=True):
    """One message over the encrypted connection, and whether it arrived."""

    direction: Text
    """out (from here to there) or in."""
    size_bytes: Natural
    arrived: bool
    seconds: Finite


class Between(Struct, frozen=True, kw_only=True):
    """The connection between this machine and another, tested from this one."""

    target: Text
    """What the user gave: an address, or "a token"; never the token itself."""
    reaches: Many[Reach] = ()
    back: Many[Reach] = ()
    """Attempts of the other machine to reach this one."""
    handshake: Text = ""
    """"" (not tried), ok, or what went wrong."""
    partner: Text = ""
    """doctor, host, probe, silent (connected, but it does not answer), or "" (not connected)."""
    partner_versions: Named[Text] = {}
    transfers: Many[Transfer] = ()
    paths: Many[ProbedPath] = ()
    """The speed of each address of the other machine, measured briefly; the used one first."""

    @property
    def used(self) -> Reach | None:
        """The attempt whose connection is used."""
        return next((r for r in self.reaches if r.wanted and r.outcome == CONNECTED), None)


class Case(Struct, frozen=True, kw_only=True):
    """The facts that the doctor examines: the content of `facts.json`."""

    here: Facts
    there: Facts | None = None
    between: Between | None = None
    format: Natural = FORMAT


def case_of(value: Any) -> Case:
    """The case in the content of a facts file; raises UserError if it is not valid."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else None
        raise UserError(
            f"the facts file has format {found!r}, but this version of potluck reads format {FORMAT}",
            hint=_AGAIN,
        )
    if isinstance(value.get("measured"), list) and isinstance(value.get("paths"), list):
        raise UserError(
            "this file was saved by potluck probe: it has speeds, but no facts for the doctor",
            hint="use it with: potluck plan --facts FILE; make one for the doctor with: potluck doctor --save FILE",
        )
    return checked.convert(value, Case, where="facts", error=UserError, hint=_AGAIN)
