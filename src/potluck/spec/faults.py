"""The faults file: which fault affects which machine of a rig, when, and for how long.

Users' files use these keys: add keys, never rename one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from potluck.errors import ConfigError
from potluck.spec import toml_file
from potluck.spec.config import build, nearest
from potluck.spec.rig import GUEST, Rig

Kind = Literal["delay", "limit", "blackhole", "reset", "half-open", "truncate", "flip", "stop", "kill"]
Direction = Literal["both", "up", "down"]

LINK_KINDS = ("delay", "limit", "blackhole", "reset", "half-open", "truncate", "flip")
PROCESS_KINDS = ("stop", "kill")
MOST_FAULTS = 1000
_AT_ONCE = ("reset", "kill")
"""Kinds that may be momentary: for_s is not required."""
_KEYS = ["about", "fault"]
_OWN_KEYS = {"delay_ms": ("delay",), "mbit": ("limit",), "return_after_s": ("kill",), "direction": LINK_KINDS}
_NEEDED = {"delay": "delay_ms", "limit": "mbit"}
_LIMITS = {
    "at_step": (1, 1e6),
    "at_s": (0, 1e6),
    "for_s": (0, 1e6),
    "delay_ms": (1e-3, 600_000),
    "mbit": (1e-3, 1e6),
    "return_after_s": (0, 1e6),
}
_EXAMPLE = '[[fault]] with machine = "laptop", kind = "stop", at_step = 6, for_s = 12'


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of one guest or of its link."""

    machine: str | None = None
    """The affected guest; the rig's first guest if not given."""
    kind: Kind
    """delay, limit, blackhole, reset, half-open, truncate, flip: the link. stop, kill: the guest's process."""
    at_step: int | None = None
    """Begin when this step begins, counted from 1."""
    at_s: float | None = None
    """Begin this many seconds after the first step began."""
    for_s: float = 0.0
    """Duration in seconds."""
    delay_ms: float | None = None
    """For delay: the added delay, each way."""
    mbit: float | None = None
    """For limit: the rate of the link in Mbit/s."""
    direction: Direction = "both"
    """The affected direction of the link: up is from the guest to the host."""
    return_after_s: float | None = None
    """For kill: start the guest again after this many seconds; never if not given."""

    def __post_init__(self) -> None:
        if (self.at_step is None) == (self.at_s is None):
            both = self.at_step is not None
            raise ConfigError(
                f"{self.kind}: both at_step and at_s" if both else f"{self.kind}: neither at_step nor at_s",
                hint="say once when it begins: at_step = 6, or at_s = 30",
            )
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(
                    f"{self.kind}: {name} is {value}", hint=f"{name} must be from {least:g} to {most:g}"
                )
        for name, kinds in _OWN_KEYS.items():
            default = "both" if name == "direction" else None
            if self.kind not in kinds and getattr(self, name) != default:
                raise ConfigError(
                    f"{self.kind}: {name} does not apply to it", hint=f"{name} applies to {', '.join(kinds)}"
                )
        needed = _NEEDED.get(self.kind)
        if needed is not None and getattr(self, needed) is None:
            raise ConfigError(f"{self.kind}: {needed} is missing", hint=f"for example {needed} = 20")
        if not self.for_s and self.kind not in _AT_ONCE:
            raise ConfigError(
                f"{self.kind}: for_s is missing", hint="give its duration in seconds, for example for_s = 12"
            )
        if self.for_s and self.kind == "kill":
            raise ConfigError("kill: for_s does not apply to it", hint="return_after_s starts the guest again")

    @property
    def amount(self) -> float:
        """The proxy's parameter: seconds for a delay, bytes/s for a limit."""
        if self.kind == "delay":
            return (self.delay_ms or 0.0) / 1e3
        return (self.mbit or 0.0) * 1e6 / 8

    @property
    def text(self) -> str:
        """A short description for a table."""
        way = {"both": "", "up": ", upwards only", "down": ", downwards only"}[self.direction]
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        if self.kind == "kill":
            after_s = self.return_after_s
            return "killed" + (f", started again after {after_s:g} s" if after_s is not None else "")
        words = {
            "stop": "stopped (SIGSTOP)",
            "delay": f"link {self.delay_ms or 0:g} ms later",
            "limit": f"link at {self.mbit or 0:g} Mbit/s",
            "blackhole": "link passes nothing",
            "reset": "connections reset",
            "half-open": "connections half-open",
            "truncate": "connections cut off in the middle of a message",
            "flip": "bits flipped on the link",
        }
        return words[self.kind] + lasts + way


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """All faults of one run."""

    about: str = ""
    faults: tuple[PlannedFault, ...] = field(default=())

    def on(self, rig: Rig) -> FaultPlan:
        """The same plan with every machine named, checked against the rig's machines and number of steps."""
        return replace(self, faults=tuple(_on(rig, fault) for fault in self.faults))


def read_text(path: Path) -> str:
    return toml_file.read_text(path, missing="give a file of faults", example="give a file of faults")


def loads(text: str, where: str) -> FaultPlan:
    """The fault plan in a TOML text. Errors begin with `where`."""
    return toml_file.loads(text, where, parse, example=_EXAMPLE)


def parse(table: Mapping[str, Any]) -> FaultPlan:
    """The fault plan from parsed TOML."""
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"there is no key {key!r}", hint=nearest(key, _KEYS))
    about, tables = table.get("about", ""), table.get("fault", [])
    if not isinstance(about, str):
        raise ConfigError(f"about is {about!r}", hint="about must be text, in quotes")
    if not isinstance(tables, list) or not all(isinstance(t, Mapping) for t in tables):
        raise ConfigError("fault is not a list of tables", hint="write [[fault]] (two brackets) for each one")
    if not 0 < len(tables) <= MOST_FAULTS:
        raise ConfigError(
            f"it has {len(tables) or 'no'} faults", hint=_EXAMPLE if not tables else f"at most {MOST_FAULTS}"
        )
    return FaultPlan(about=about, faults=tuple(_fault(t, number) for number, t in enumerate(tables, 1)))


def _fault(table: Mapping[str, Any], number: int) -> PlannedFault:
    values = {key.replace("-", "_"): value for key, value in table.items()}
    try:
        if "kind" not in values:
            raise ConfigError("it has no kind", hint="kind is one of " + ", ".join((*LINK_KINDS, *PROCESS_KINDS)))
        return build(PlannedFault, values)
    except ConfigError as error:
        raise ConfigError(f"fault number {number}: {error.what}", hint=error.hint) from error


def _on(rig: Rig, fault: PlannedFault) -> PlannedFault:
    if not rig.guests:
        raise ConfigError(f"the rig {rig.name} has no guest", hint="add a [[machine]]")
    machine = rig.machine(fault.machine) if fault.machine is not None else rig.guests[0]
    if machine.role != GUEST:
        raise ConfigError(
            f"a fault names {machine.name}, which is the host",
            hint="faults affect guests and their links: " + ", ".join(m.name for m in rig.guests),
        )
    if fault.at_step is not None and fault.at_step > rig.workload.steps:
        raise ConfigError(
            f"a fault at step {fault.at_step}, but the run makes {rig.workload.steps} steps",
            hint="choose an earlier step, or a longer run with --steps",
        )
    return replace(fault, machine=machine.name)
