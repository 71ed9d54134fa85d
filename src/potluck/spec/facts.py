"""Facts: what was found out about a machine, and about the way between two, as plain data that goes to a file.

Owns the shape of `facts.json` and its reading. It must not know how facts are collected nor what they mean.
None everywhere says: not known here.
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
    """What the machine knows of the address on its own network: reachable or failed; None where it is far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsLine:
    """One line of the hosts file."""

    address: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One question to the resolver: a name's addresses, or an address's name."""

    asked: str
    seconds: float
    answers: tuple[str, ...] = ()
    error: str = ""
    finished: bool = True
    """False: there was no answer by the deadline, after `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of this machine that is wanted, and who has it."""

    number: int
    free: bool
    holder: str | None = None
    wanted_by: str = ""
    """--port, MASTER_PORT, torchrun's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firewall:
    """One firewall and what it does with connections from outside."""

    tool: str
    """ufw, firewalld, nftables, iptables, macos, windows."""
    blocks: bool | None
    """Whether incoming connections are dropped unless a rule allows them."""
    allowed: tuple[str, ...] = ()
    """Ports or ranges that rules let in: 22, 6000-6010."""
    denied: tuple[str, ...] = ()
    """Ports or ranges that rules keep out."""
    out_blocks: bool = False
    """Whether connections from here to others are dropped unless a rule allows them."""
    out_allowed: tuple[str, ...] = ()
    out_denied: tuple[str, ...] = ()
    how: str = ""
    """The command whose output says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipv6:
    """How much of IPv6 is there."""

    sockets: bool = True
    """The system makes IPv6 sockets."""
    loopback: bool = True
    """::1 can be listened on."""
    switched_off: bool = False
    """By setting (disable_ipv6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    name: str = ""
    physical: int = 1
    logical: int = 1
    usable: int = 1
    """Physical cores that this process may keep busy, within affinity and quota."""


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
    """A process of a training whose starter is gone."""

    pid: int
    command: str
    age_s: float
    why: str
    """How one knows that nobody waits for it."""
    surely: bool = False
    """It says itself whom it belongs to, and that process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: str
    whole: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One try to log in without a password."""

    host: str
    status: int | None
    """ssh's exit status; None: it did not end in time, or there is no ssh."""
    said: str = ""
    python: str = ""
    """What Python answered there, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine."""

    name: str
    platform: str
    """linux, darwin, win32."""
    system: str = ""
    """The system's own words for its version."""
    architecture: str = ""
    translated: bool = False
    """An Intel Python on an Apple processor (Rosetta)."""
    wsl: bool = False
    python: str = ""
    potluck: str = ""
    protocol: int = 0
    torch: Torch = field(default_factory=Torch)
    interfaces: tuple[Interface, ...] = ()
    default_address: str | None = None
    """What `potluck host` listens on: where packets to the world leave from, if any do."""
    default_route: bool = True
    hosts: tuple[HostsLine, ...] = ()
    hosts_path: str = "/etc/hosts"
    lookups: tuple[Lookup, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that decide about networks and threads; no secrets."""
    ports: tuple[Port, ...] = ()
    firewalls: tuple[Firewall, ...] = ()
    ipv6: Ipv6 = field(default_factory=Ipv6)
    cpu: Cpu = field(default_factory=Cpu)
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    model_parameters: int | None = None
    """Of the model that is to be trained, where the person said so."""
    disk: Disk | None = None
    power: Power = field(default_factory=Power)
    gpus: tuple[Gpu, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    """Newest first."""
    ssh: tuple[SshHost, ...] = ()

    def interface(self, name: str | None) -> Interface | None:
        return next((i for i in self.interfaces if i.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One try to open a TCP connection."""

    machine: str
    """Who tried."""
    address: str
    port: int
    outcome: str
    """connected, refused, timeout, no route, denied, unknown name, failed."""
    errno: int | None = None
    seconds: float = 0.0
    wanted: bool = True
    """False: a port that nobody need listen on, tried to see whether the machine answers at all."""
    route: Route | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message through the encrypted connection, and whether it arrived."""

    direction: str
    """out (from here to there) or in."""
    size_bytes: int
    arrived: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The way between this machine and another, tried from this one."""

    target: str
    """What the person gave: an address, or "a token"; never the token itself."""
    reaches: tuple[Reach, ...] = ()
    back: tuple[Reach, ...] = ()
    """Tries of the other machine to reach this one."""
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
        """The connection that is used."""
        return next((r for r in self.reaches if r.wanted and r.outcome == CONNECTED), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the doctor looks at, and what `facts.json` holds."""

    here: Facts
    there: Facts | None = None
    between: Between | None = None
    format: int = FORMAT


def to_json(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case), indent=1) + "\n"


def from_json(text: str | bytes) -> Case:
    """The case in a file; UserError says what is wrong with it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(
            "these facts are not readable JSON", hint="make them with: potluck doctor --save FILE"
        ) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else None
        raise UserError(
            f"facts of format {found!r} cannot be read, this version of potluck reads {FORMAT}",
            hint="make them anew with: potluck doctor --save FILE",
        )
    if isinstance(value.get("measured"), list) and isinstance(value.get("paths"), list):
        raise UserError(
            "this file is a probe's: it holds speeds, and no facts about the machine that a doctor could look at",
            hint="potluck plan --facts FILE reads it; for the doctor make one with: potluck doctor --save FILE",
        )
    return from_plain(Case, value, "facts")


def machine_to_dict(facts: Facts) -> dict[str, Any]:
    return dataclasses.asdict(facts)


def machine_from_dict(value: Any) -> Facts:
    """Facts that another machine sent: checked as a file is."""
    return from_plain(Facts, value, "facts")


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """A dataclass from JSON. Unknown keys are left out, so that a newer version's facts can be read."""
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    hints = typing.get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(typing.cast(Any, kind))]
    given = {name: _converted(value[name], hints[name], f"{where}.{name}") for name in known if name in value}
    try:
        return kind(**given)
    except TypeError as error:
        raise UserError(f"{where} is incomplete: {error}", hint="make the facts anew") from None


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
        f"{where} is {str(value)[:40]!r}, not {wanted}", hint="make the facts anew: potluck doctor --save FILE"
    )
