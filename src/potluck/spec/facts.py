"""Facts about a machine and about the connection between two: the data in `facts.json`, and how it is read.

None means not known.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from potluck.errors import UserError
from potluck.spec.probed import ProbedPath

FORMAT = 1
T = TypeVar("T")

ETHERNET, WIFI, THUNDERBOLT, VPN = "ethernet", "wifi", "thunderbolt", "vpn"
CONTAINER, LOOPBACK, OTHER = "container", "loopback", "other"

CONNECTED, REFUSED, TIMEOUT, NO_ROUTE = "connected", "refused", "timeout", "no route"
DENIED, UNKNOWN_NAME, FAILED = "denied", "unknown name", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface."""

    name: str
    kind: str = OTHER
    """ethernet, wifi, thunderbolt, vpn, container, loopback, other."""
    up: bool = True
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6, each with its prefix: 192.168.1.5/24."""
    mtu: int | None = None
    speed_mbit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where packets to an address leave this machine."""

    to: str
    interface: str | None
    source: str
    neighbour: str | None = None
    """State of the address in the neighbour table: reachable or failed; None if it is not on this network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsLine:
    """One line of the hosts file."""

    address: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One query to the resolver: the addresses of a name, or the name of an address."""

    asked: str
    seconds: float
    answers: tuple[str, ...] = ()
    error: str = ""
    finished: bool = True
    """False if there was no answer within `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of this machine that is needed, and the process that uses it."""

    number: int
    free: bool
    holder: str | None = None
    wanted_by: str = ""
    """What needs it: --port, MASTER_PORT, torchrun's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firewall:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipv6:
    """Which parts of IPv6 work."""

    sockets: bool = True
    """Whether IPv6 sockets can be created."""
    loopback: bool = True
    """Whether ::1 can be listened on."""
    switched_off: bool = False
    """Whether it is disabled by a setting (disable_ipv6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    name: str = ""
    physical: int = 1
    logical: int = 1
    usable: int = 1
    """Physical cores that this process may use, within affinity and quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system of the folder that holds runs."""

    path: str
    free_bytes: int | None = None
    writable: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    on_battery: bool | None = None
    percent: float | None = None
    sleeps_after_s: float | None = None
    """Idle seconds until the system sleeps by itself; 0: never."""
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    vendor: str
    """nvidia, amd, apple."""
    name: str = ""
    driver: str = ""
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    version: str | None = None
    cuda_build: str | None = None
    hip_build: str | None = None
    cuda_available: bool | None = None
    mps_built: bool | None = None
    mps_available: bool | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A training process whose parent has ended."""

    pid: int
    command: str
    age_s: float
    why: str
    """The evidence that nobody waits for it."""
    surely: bool = False
    """Whether the process itself names its owner, and that owner is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: str
    whole: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One attempt to log in without a password."""

    host: str
    status: int | None
    """Exit status of ssh; None if it did not end in time or ssh is not installed."""
    said: str = ""
    python: str = ""
    """Output of Python on that machine, if it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
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
    torch: Torch = field(default_factory=Torch)
    interfaces: tuple[Interface, ...] = ()
    default_address: str | None = None
    """The address that `potluck host` listens on: that of the default route, if there is one."""
    default_route: bool = True
    hosts: tuple[HostsLine, ...] = ()
    hosts_path: str = "/etc/hosts"
    lookups: tuple[Lookup, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables about networks and threads; no secrets."""
    ports: tuple[Port, ...] = ()
    firewalls: tuple[Firewall, ...] = ()
    ipv6: Ipv6 = field(default_factory=Ipv6)
    cpu: Cpu = field(default_factory=Cpu)
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    model_parameters: int | None = None
    """Parameters of the model to be trained, if given with --parameters."""
    disk: Disk | None = None
    power: Power = field(default_factory=Power)
    gpus: tuple[Gpu, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints of the run, newest first."""
    ssh: tuple[SshHost, ...] = ()

    def interface(self, name: str | None) -> Interface | None:
        return next((i for i in self.interfaces if i.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message over the encrypted connection, and whether it arrived."""

    direction: str
    """out (from here to there) or in."""
    size_bytes: int
    arrived: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
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
    partner_versions: Mapping[str, str] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    paths: tuple[ProbedPath, ...] = ()
    """How fast each address of the other machine is, measured in a moment; the used one first."""

    @property
    def used(self) -> Reach | None:
        """The attempt whose connection is used."""
        return next((r for r in self.reaches if r.wanted and r.outcome == CONNECTED), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The facts that the doctor examines: the content of `facts.json`."""

    here: Facts
    there: Facts | None = None
    between: Between | None = None
    format: int = FORMAT


def to_json(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case), indent=1) + "\n"


def from_json(text: str | bytes) -> Case:
    """The case in a JSON text; raises UserError if it is not valid."""
    try:
        value = json.loads(text)
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
    return from_plain(Case, value, "facts")


def machine_to_dict(facts: Facts) -> dict[str, Any]:
    return dataclasses.asdict(facts)


def machine_from_dict(value: Any) -> Facts:
    """Facts sent by another machine, checked like a file."""
    return from_plain(Facts, value, "facts")


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """A dataclass from parsed JSON. Unknown keys are ignored, so that facts of newer versions can be read."""
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    hints = typing.get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(typing.cast(Any, kind))]
    given = {name: _converted(value[name], hints[name], f"{where}.{name}") for name in known if name in value}
    try:
        return kind(**given)
    except TypeError as error:
        raise UserError(
            f"{where} is incomplete: {error}", hint="make the file again: potluck doctor --save FILE"
        ) from None


def _converted(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _converted(value, next(a for a in arguments if a is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(where, "a list", value)
        return tuple(_converted(item, arguments[0], f"{where}[{n}]") for n, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(where, "an object", value)
        return {str(k): _converted(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type[Any], hint), value, where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise _wrong(
            where, {int: "a whole number", str: "text", bool: "true or false"}.get(hint, "a number"), value
        )
    return value


def _wrong(where: str, wanted: str, value: Any) -> UserError:
    return UserError(
        f"{where} is {str(value)[:40]!r}, not {wanted}", hint="make the file again: potluck doctor --save FILE"
    )
