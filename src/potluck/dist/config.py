"""The settings of the backend: their names, environment variables and limits, and how they are resolved. PURE.

A setting comes from the `Config` object, else from its POTLUCK_DIST_* variable, else it has its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec

from potluck import checked, env
from potluck.checked import did_you_mean
from potluck.codec.names import parse_collective
from potluck.errors import CollectiveError, ConfigError

PREFIX = "POTLUCK_DIST_"
TRANSPORTS = ("auto", "tcp", "shm")
ALGORITHMS = ("auto", "direct", "owners", "ring")
TRACE = 5
"""The level, below DEBUG, at which every collective is logged."""
LOG_LEVELS = {"trace": TRACE, "debug": 10, "info": 20, "warning": 30, "error": 40, "off": 100}
"""Levels of `logging`."""
SHARED = (
    "transport", "chunk_bytes", "small_bytes", "algorithm", "compression", "checksum", "encryption", "heartbeat_s",
)  # fmt: skip
"""Settings that must be the same on all ranks of a group."""
SharedSettings = dict[str, bool | int | float | str | None]

_KIB, _MIB = 1024, 1024**2
_UNITS = {"b": 1, "kib": _KIB, "mib": _MIB, "k": _KIB, "m": _MIB}
_SWITCH_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of the backend. A setting that is None comes from its environment variable, else it has its default.

    Example:
        options = potluck.dist.Config(compression="int8", interface="eth0")
        torch.distributed.init_process_group("potluck", pg_options=options)
    """

    transport: str | None = None
    """auto: shared memory between ranks of one machine, TCP between machines. tcp: TCP everywhere. shm: refuse
    ranks on another machine."""
    address: str | None = None
    """The numeric address of this machine at which others reach it; None: chosen, with the reason in the log."""
    interface: str | None = None
    """The network interface whose address is used; `address` takes precedence."""
    port_base: int | None = None
    """Rank r listens on this port + r, skipping MASTER_PORT; 0, the default: any free port."""
    chunk_bytes: int | None = None
    """Tensors are sent in chunks of this size, so that sending, receiving and reducing overlap; default 512 KiB."""
    small_bytes: int | None = None
    """Up to this size a collective uses the fewest round trips, above it the fewest bytes; default 32 KiB."""
    algorithm: str | None = None
    """All-reduce algorithm between machines above `small_bytes`. direct: each rank sends its tensor to all others.
    owners: each rank reduces one part and sends it to the others. ring: parts go from neighbour to neighbour.
    auto: the fastest one as measured."""
    compression: str | None = None
    """Compression of the floats of an all-reduce: none, fp16, bf16, int8, int4, topk, topk:0.05."""
    checksum: bool | None = None
    """Whether each chunk carries a checksum; default off, because encryption has its own."""
    encryption: bool | None = None
    """Whether traffic between machines is encrypted and authenticated; default on."""
    copy_threads: int | None = None
    """Threads of this rank that copy and reduce large tensors between ranks of one machine, if torch has one.
    0, the default: the cores available per rank, at most 4. 1: only the calling thread."""
    timeout_s: float | None = None
    """Timeout of a collective; None: the timeout of the group."""
    connect_timeout_s: float | None = None
    """Timeout for all ranks to connect to each other; default 60 s."""
    heartbeat_s: float | None = None
    """Time between two heartbeats; default 1 s."""
    heartbeat_timeout_s: float | None = None
    """A rank counts as gone after this much silence; default 5 s."""
    log_level: str | None = None
    """Level of the logger `potluck.dist`: trace (every collective), debug, info, warning, error or off; default
    warning."""

    def __new__(cls, **settings: Any) -> Config:
        """Refuse an unknown setting with a ConfigError instead of the dataclass's TypeError."""
        for name in settings:
            if name not in _RULES:
                raise ConfigError(
                    f"Config({name}={settings[name]!r}): there is no setting {name!r}",
                    hint=f"{did_you_mean(name, _RULES)}settings: {', '.join(_RULES)}",
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                object.__setattr__(self, item.name, _checked(item.name, value, f"Config({item.name}={value!r})"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAddress:
    """An address of this machine."""

    name: str
    address: str
    """The numeric address, without zone or mask."""
    up: bool = True
    loopback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigContext:
    """The facts about the machine and the group that `resolve` needs."""

    rank: int
    world: int
    interfaces: tuple[LocalAddress, ...] = ()
    master_address: str | None = None
    """MASTER_ADDR as set by the user."""
    master_port: int | None = None
    source_address: str | None = None
    """This machine's address on the route to MASTER_ADDR; None: there is no route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The resolved settings."""

    rank: int
    transport: str
    address: str
    interface: str
    reason: str
    """Why this address was chosen."""
    port: int
    """The port on which this rank listens; 0: any free port."""
    stream_port: int
    """The port on which it accepts a stream for large tensors; 0: any free port."""
    chunk_bytes: int
    small_bytes: int
    algorithm: str
    compression: str
    checksum: bool
    encryption: bool
    copy_threads: int
    timeout_s: float | None
    connect_timeout_s: float
    heartbeat_s: float
    heartbeat_timeout_s: float
    log_level: str
    said_by: Mapping[str, str] = field(default_factory=dict)
    """The source of each setting: Config, the variable's name, or default."""

    def shared(self) -> SharedSettings:
        """The settings that must be the same on all ranks, for the rendezvous."""
        return {name: getattr(self, name) for name in SHARED}

    def describe(self) -> str:
        """One line for each setting, with its source, for the log."""
        shown = {item.name: _shown(item.name, getattr(self, item.name, None)) for item in fields(Config)}
        shown["address"] += f": {self.reason}"
        shown["port_base"] = _shown("port_base", self.port) + (
            f" and {self.stream_port}" if self.stream_port else ""
        )
        lines = [f"  {name:<20} {text}  ({self.said_by.get(name, 'default')})" for name, text in shown.items()]
        return "\n".join([f"settings of rank {self.rank}:", *lines])


def resolve(config: Config | None, environ: Mapping[str, str], facts: ConfigContext) -> Resolved:
    """Find the value of every setting.

    Raises:
        ConfigError: an unknown variable, an invalid value, or an address that this machine does not have.
    """
    settings, said_by = _merged(config or Config(), environ)
    given = {name: _as_given(name, value, said_by[name]) for name, value in settings.items()}
    if settings["heartbeat_timeout_s"] < 2 * settings["heartbeat_s"]:
        raise ConfigError(
            f"{given['heartbeat_timeout_s']} is less than two heartbeats of {settings['heartbeat_s']:g} s",
            hint="one late heartbeat would end the run: give at least "
            f"{PREFIX}HEARTBEAT_TIMEOUT_S={2 * settings['heartbeat_s']:g} (or heartbeat_timeout_s of a Config)",
        )
    chosen, reason = _address(settings.pop("address"), settings.pop("interface"), given, facts)
    port, stream_port = _ports(settings.pop("port_base"), given, facts)
    return Resolved(
        rank=facts.rank,
        address=chosen.address,
        interface=chosen.name,
        reason=reason,
        port=port,
        stream_port=stream_port,
        said_by=said_by,
        **settings,
    )


def disagreement(by_rank: Mapping[int, SharedSettings]) -> CollectiveError | None:
    """The error to raise if ranks have different settings (`shared()` of each); None if they agree."""
    ranks = sorted(by_rank)
    for name in SHARED:
        values: dict[Any, list[int]] = {}
        for rank in ranks:
            values.setdefault(by_rank[rank].get(name), []).append(rank)
        if len(values) > 1:
            sides = "; ".join(f"{_shown(name, value)} on {ranks_text(who)}" for value, who in values.items())
            return CollectiveError(
                f"the ranks have different settings of {name}: {sides}",
                hint=f"give all the same Config, or the same {PREFIX}{name.upper()}",
            )
    return None


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text


# -- settings


def _merged(config: Config, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    env.check_names(environ)
    settings: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for name, rule in _RULES.items():
        variable = PREFIX + name.upper()
        text = environ.get(variable, "").strip()
        given = getattr(config, name)
        if given is not None:
            settings[name], said_by[name] = given, "Config"
        elif text:
            settings[name], said_by[name] = _checked(name, text, f"{variable}={text!r}"), variable
        else:
            settings[name], said_by[name] = rule.default, "default"
    return settings, said_by


def _as_given(name: str, value: Any, said_by: str) -> str:
    """A setting as its source wrote it."""
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    return {"Config": f"Config({name}={shown})", "default": f"{name}={shown}"}.get(said_by, f"{said_by}={shown}")


@dataclass(frozen=True, slots=True)
class _Rule:
    default: Any
    type: Any
    """The type that msgspec checks the value against."""
    hint: str


def _checked(name: str, value: Any, shown: str) -> Any:
    """The value of a setting, from a value or from text; `shown` is how the user wrote it."""
    rule = _RULES[name]
    try:
        if not isinstance(value, str):
            return checked.as_kind(value, rule.type)
        if rule.type is not _NAME:
            value = _plain_text(value.strip().lower(), rule.type)
        value = checked.as_kind(value, rule.type, strict=False)
        if name == "compression":
            parse_collective(value)
        return value
    except ConfigError as error:
        raise ConfigError(f"{shown} is not valid: {error.what}", hint=error.hint) from None
    except msgspec.ValidationError:
        raise ConfigError(f"{shown} is not valid", hint=rule.hint) from None


def _plain_text(text: str, wanted: Any) -> str:
    """Text that msgspec can read: without units, and with true or false for a switch."""
    size = re.fullmatch(r"([0-9]{1,15}) *(b|k|kib|m|mib)", text)
    if size:
        return str(int(size[1]) * _UNITS[size[2]])
    return _SWITCH_WORDS.get(text, text) if wanted is bool else text


def _from_to(kind: type, low: float, high: float) -> Any:
    return Annotated[kind, msgspec.Meta(ge=low, le=high)]


_NAME = Annotated[str, msgspec.Meta(pattern=r"^[^\s\x00-\x1f\x7f]+$")]
_BYTES = "a number of bytes from {} to {}, for example 524288 or 512KiB"
_TIME = "a number of seconds from {:g} to {:.0f}"
_SWITCH = "use 1 or 0 (True or False in a Config)"
_DAY = 86_400.0
_MOST_THREADS = 64

_RULES: dict[str, _Rule] = {
    "transport": _Rule("auto", Literal[TRANSPORTS], "use one of " + ", ".join(TRANSPORTS)),
    "address": _Rule(None, _NAME, "use an address of this machine, as a number such as 192.168.1.7"),
    "interface": _Rule(None, _NAME, "use the name of a network interface of this machine, such as eth0"),
    "port_base": _Rule(0, _from_to(int, 0, 65_535), "use 0 for any free port, or a port from 1024 to 65535"),
    "chunk_bytes": _Rule(512 * _KIB, _from_to(int, 4 * _KIB, 64 * _MIB), _BYTES.format("4KiB", "64MiB")),
    "small_bytes": _Rule(32 * _KIB, _from_to(int, 0, 64 * _MIB), _BYTES.format("0", "64MiB")),
    "algorithm": _Rule("auto", Literal[ALGORITHMS], "use one of " + ", ".join(ALGORITHMS)),
    "compression": _Rule("none", str, "use none, fp16, bf16, int8, int4, topk or topk:0.05"),
    "checksum": _Rule(False, bool, _SWITCH),
    "encryption": _Rule(True, bool, _SWITCH),
    "copy_threads": _Rule(
        0, _from_to(int, 0, _MOST_THREADS), f"use a number from 1 to {_MOST_THREADS}, or 0 for an automatic choice"
    ),
    "timeout_s": _Rule(None, _from_to(float, 0.001, 30 * _DAY), _TIME.format(0.001, 30 * _DAY)),
    "connect_timeout_s": _Rule(60.0, _from_to(float, 0.1, _DAY), _TIME.format(0.1, _DAY)),
    "heartbeat_s": _Rule(1.0, _from_to(float, 0.05, 600), _TIME.format(0.05, 600)),
    "heartbeat_timeout_s": _Rule(5.0, _from_to(float, 0.1, _DAY), _TIME.format(0.1, _DAY)),
    "log_level": _Rule("warning", Literal[tuple(LOG_LEVELS)], "use one of " + ", ".join(LOG_LEVELS)),
}


# -- the address and the port


def _address(
    address: str | None, interface: str | None, given: Mapping[str, str], facts: ConfigContext
) -> tuple[LocalAddress, str]:
    usable = [i for i in facts.interfaces if i.up]
    there = "this machine has " + (", ".join(f"{i.address} ({i.name})" for i in usable) or "no address at all")
    if address is not None:
        found = [i for i in usable if i.address == address]
        if not found:
            raise ConfigError(
                f"{given['address']} is not valid: {address} is not an address of this machine",
                hint=f"{there}; name one of them",
            )
        return found[0], "it was asked for"
    if interface is not None:
        found = [i for i in usable if i.name == interface]
        if not found:
            down = any(i.name == interface for i in facts.interfaces)
            what = f"the interface {interface!r} is down" if down else f"there is no interface {interface!r} here"
            raise ConfigError(f"{given['interface']} is not valid: {what}", hint=there)
        return _best(found), "the interface was asked for"
    if facts.source_address is not None:
        found = [i for i in usable if i.address == facts.source_address]
        chosen = found[0] if found else LocalAddress(name="?", address=facts.source_address)
        if chosen.loopback:
            return chosen, f"MASTER_ADDR {facts.master_address} is this machine"
        return chosen, f"it routes to MASTER_ADDR {facts.master_address}"
    outside = [i for i in usable if not i.loopback]
    why = f"there is no route to MASTER_ADDR {facts.master_address}" if facts.master_address else "no MASTER_ADDR"
    if outside:
        return _best(outside), f"{why}, so the first interface that is up"
    if usable:
        return _best(usable), f"{why}, and no other interface is up"
    raise ConfigError("this machine has no address to listen on", hint="check its network, or set `address`")


def _best(candidates: list[LocalAddress]) -> LocalAddress:
    """The first interface with an IPv4 address. A link-local address, which needs a zone, comes last."""
    return min(candidates, key=lambda i: (i.address.startswith(("fe80:", "169.254.")), ":" in i.address))


def _ports(base: int, given: Mapping[str, str], facts: ConfigContext) -> tuple[int, int]:
    """The port of this rank and, after those of all ranks, its port for large tensors."""
    if base == 0:
        return 0, 0
    port, stream = (_skipped(base, base + number, facts) for number in (facts.rank, facts.world + facts.rank))
    if base < 1024 or stream > 65_535:
        raise ConfigError(
            f"{given['port_base']} gives rank {facts.rank} of {facts.world} the ports {port} and {stream}",
            hint=f"take a base from 1024 to {65_535 - 2 * facts.world}, or 0 for any free port",
        )
    return port, stream


def _skipped(base: int, port: int, facts: ConfigContext) -> int:
    """The port, skipping MASTER_PORT."""
    return port + (facts.master_port is not None and base <= facts.master_port <= port)


# -- text


def _size(count: int) -> str:
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes") and isinstance(value, int):
        return _size(value)
    if name.endswith("_s"):
        return f"{value:g} s" if isinstance(value, int | float) else "the group's"
    if name == "copy_threads" and value == 0:
        return "as there are cores"
    return "any free port" if name == "port_base" and value == 0 else str(value)
