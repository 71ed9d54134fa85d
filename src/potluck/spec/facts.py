"""Facts about a machine and about the connection between two: the data in `facts.json`, and how it is read.

None means not known. Keys of newer versions are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from potluck import checked
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

    name: str
    kind: str = OTHER
    """ethernet, wifi, thunderbolt, vpn, container, loopback, other."""
    up: bool = True
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6, each with its prefix: 192.168.1.5/24."""
    mtu: int | None = None
    speed_mbit: int | None = None


class Route(Struct, frozen=True, kw_only=True):
    """The route of packets to an address."""

    to: str
    interface: str | None
    source: str
    neighbour: str | None = None
    """State of the address in the neighbour table: reachable or failed; None if it is not on this network."""


class HostsLine(Struct, frozen=True, kw_only=True):
    """One line of the hosts file."""

    address: str
    names: tuple[str, ...]


class Lookup(Struct, frozen=True, kw_only=True):
    """One query to the resolver: the addresses of a name, or the name of an address."""

    asked: str
    seconds: float
    answers: tuple[str, ...] = ()
    error: str = ""
    finished: bool = True
    """False if there was no answer within `seconds`."""


class Port(Struct, frozen=True, kw_only=True):
    """A port of this machine that is needed, and the process that uses it."""

    number: int
    free: bool
    holder: str | None = None
    wanted_by: str = ""
    """What needs it: --port, MASTER_PORT, torchrun's default."""


class Firewall(Struct, frozen=True, kw_only=True):
    """One firewall and what it does with connections from outside."""

    tool: str
    """ufw, firewalld, nftables, iptables, macos, windows."""
    blocks: bool | None
    """Whether incoming connections are dropped unless a rule allows them."""
    allowed: tuple[str, ...] = ()
    """Ports or ranges that rules allow in: 22, 6000-6010."""
    denied: tuple[str, ...] = ()
    """Ports or ranges that rules block."""
    out_blocks: bool = False
    """Whether outgoing connections are dropped unless a rule allows them."""
    out_allowed: tuple[str, ...] = ()
    out_denied: tuple[str, ...] = ()
    how: str = ""
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
    name: str = ""
    physical: int = 1
    logical: int = 1
    usable: int = 1
    """Physical cores that this process may use, within affinity and quota."""


class Disk(Struct, frozen=True, kw_only=True):
    """The file system of the folder that holds runs."""

    path: str
    free_bytes: int | None = None
    writable: bool = True
    error: str = ""


class Power(Struct, frozen=True, kw_only=True):
    on_battery: bool | None = None
    percent: float | None = None
    sleeps_after_s: float | None = None
    """Idle seconds until the system sleeps by itself; 0: never."""
    how: str = ""


class Gpu(Struct, frozen=True, kw_only=True):
    vendor: str
    """nvidia, amd, apple."""
    name: str = ""
    driver: str = ""
    how: str = ""


class Torch(Struct, frozen=True, kw_only=True):
    version: str | None = None
    cuda_build: str | None = None
    hip_build: str | None = None
    cuda_available: bool | None = None
    mps_built: bool | None = None
    mps_available: bool | None = None
    error: str = ""


class Orphan(Struct, frozen=True, kw_only=True):
    """A training process whose parent has ended."""

    pid: int
    command: str
    age_s: float
    why: str
    """The evidence that nobody waits for it."""
    surely: bool = False
    """Whether the process itself names its owner, and that owner is gone."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    path: str
    whole: bool
    why: str = ""


class SshHost(Struct, frozen=True, kw_only=True):
    """One attempt to log in without a password."""

    host: str
    status: int | None
    """Exit status of ssh; None if it did not end in time or ssh is not installed."""
    said: str = ""
    python: str = ""
    """Output of Python on that machine, if it ran."""


class Facts(Struct, frozen=True, kw_only=True):
    """One machine."""

    name: str
    platform: str
    """linux, darwin, win32."""
    system: str = ""
    """The version as the system describes it."""
    architecture: str = ""
    translated: bool = False
    """Whether this is an Intel Python on an Apple processor (Rosetta)."""
    wsl: bool = False
    python: str = ""
    potluck: str = ""
    protocol: int = 0
    torch: Torch = Torch()
    interfaces: tuple[Interface, ...] = ()
    default_address: str | None = None
    """The address that `potluck host` listens on: that of the default route, if there is one."""
    default_route: bool = True
    hosts: tuple[HostsLine, ...] = ()
    hosts_path: str = "/etc/hosts"
    lookups: tuple[Lookup, ...] = ()
    environment: Mapping[str, str] = {}
    """Environment variables about networks and threads; no secrets."""
    ports: tuple[Port, ...] = ()
    firewalls: tuple[Firewall, ...] = ()
    ipv6: Ipv6 = Ipv6()
    cpu: Cpu = Cpu()
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    model_parameters: int | None = None
    """Parameters of the model to be trained, if given with --parameters."""
    disk: Disk | None = None
    power: Power = Power()
    gpus: tuple[Gpu, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints of the run, newest first."""
    ssh: tuple[SshHost, ...] = ()

    def interface(self, name: str | None) -> Interface | None:
        return next((i for i in self.interfaces if i.name == name), None)


class Reach(Struct, frozen=True, kw_only=True):
    """One attempt to open a TCP connection."""

    machine: str
    """The machine that tried."""
    address: str
    port: int
    outcome: str
    """connected, refused, timeout, no route, denied, unknown name, failed."""
    errno: int | None = None
    seconds: float = 0.0
    wanted: bool = True
    """False for a port where nothing needs to listen, tried only to see whether the machine answers."""
    route: Route | None = None


class Transfer(Struct, frozen=True, kw_only=True):
    """One message over the encrypted connection, and whether it arrived."""

    direction: str
    """out (from here to there) or in."""
    size_bytes: int
    arrived: bool
    seconds: float


class Between(Struct, frozen=True, kw_only=True):
    """The connection between this machine and another, tested from this one."""

    target: str
    """What the user gave: an address, or "a token"; never the token itself."""
    reaches: tuple[Reach, ...] = ()
    back: tuple[Reach, ...] = ()
    """Attempts of the other machine to reach this one."""
    handshake: str = ""
    """"" (not tried), ok, or what went wrong."""
    partner: str = ""
    """doctor, host, probe, silent (connected, but it does not answer), or "" (not connected)."""
    partner_versions: Mapping[str, str] = {}
    transfers: tuple[Transfer, ...] = ()
    paths: tuple[ProbedPath, ...] = ()
    """How fast each address of the other machine is, measured in a moment; the used one first."""

    @property
    def used(self) -> Reach | None:
        """The attempt whose connection is used."""
        return next((r for r in self.reaches if r.wanted and r.outcome == CONNECTED), None)


class Case(Struct, frozen=True, kw_only=True):
    """The facts that the doctor examines: the content of `facts.json`."""

    here: Facts
    there: Facts | None = None
    between: Between | None = None
    format: int = FORMAT


def from_json(text: str | bytes) -> Case:
    """The case in a JSON text; raises UserError if it is not valid."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(
            "the facts file is not valid JSON", hint="make one with: potluck doctor --save FILE"
        ) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else None
        raise UserError(
            f"the facts file has format {found!r}, but this version of potluck reads format {FORMAT}",
            hint="make it again with: potluck doctor --save FILE",
        )
    if isinstance(value.get("measured"), list) and isinstance(value.get("paths"), list):
        raise UserError(
            "this file was saved by potluck probe: it has speeds, but no facts for the doctor",
            hint="use it with: potluck plan --facts FILE; make one for the doctor with: potluck doctor --save FILE",
        )
    return checked.convert(value, Case, where="facts", error=UserError, hint=_AGAIN)
