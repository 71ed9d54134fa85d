"""The faults file: which fault affects which machine of a rig, when, and for how long.

Users' files use these keys: add keys, never rename one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from potluck import checked
from potluck.bounds import Many, Text
from potluck.errors import ConfigError
from potluck.spec.rig import GUEST, Mbit, Rig, StepNumber

LinkKind = Literal["delay", "limit", "blackhole", "reset", "half-open", "truncate", "flip"]
ProcessKind = Literal["stop", "kill"]
Direction = Literal["both", "up", "down"]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]

LINK_KINDS = get_args(LinkKind)
MOST_FAULTS = 1000
_AT_ONCE = ("reset", "kill")
"""Kinds that may be momentary: for_s is not required."""
_OWN_KEYS = {"delay_ms": ("delay",), "mbit": ("limit",), "return_after_s": ("kill",), "direction": LINK_KINDS}
_NEEDED = {"delay": "delay_ms", "limit": "mbit"}
_EXAMPLE = '[[fault]] with machine = "laptop", kind = "stop", at_step = 6, for_s = 12'


class PlannedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault of one guest or of its link."""

    machine: Text | None = None
    """The affected guest; the rig's first guest if not given."""
    kind: Literal[LinkKind, ProcessKind]
    """delay, limit, blackhole, reset, half-open, truncate, flip: the link. stop, kill: the guest's process."""
    at_step: StepNumber | None = None
    """Begin when this step begins, counted from 1."""
    at_s: Seconds | None = None
    """Begin this many seconds after the first step began."""
    for_s: Seconds = 0.0
    """Duration in seconds."""
    delay_ms: Annotated[float, Meta(ge=1e-3, le=600_000)] | None = None
    """For delay: the added delay, each way."""
    mbit: Mbit | None = None
    """For limit: the rate of the link in Mbit/s."""
    direction: Direction = "both"
    """The affected direction of the link: up is from the guest to the host."""
    return_after_s: Seconds | None = None
    """For kill: start the guest again after this many seconds; never if not given."""

    def __post_init__(self) -> None:
        if (self.at_step is None) == (self.at_s is None):
            both = self.at_step is not None
            raise ConfigError(
                f"{self.kind}: both at_step and at_s" if both else f"{self.kind}: neither at_step nor at_s",
                hint="say once when it begins: at_step = 6, or at_s = 30",
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


class FaultPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"faults": "fault"}):
    """All faults of one run."""

    about: Text = ""
    faults: Many[PlannedFault] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.faults) <= MOST_FAULTS:
            raise ConfigError(
                f"it has {len(self.faults) or 'no'} faults",
                hint=_EXAMPLE if not self.faults else f"at most {MOST_FAULTS}",
            )

    def on(self, rig: Rig) -> FaultPlan:
        """The same plan with every machine named, checked against the rig's machines and number of steps."""
        return replace(self, faults=tuple(_on(rig, fault) for fault in self.faults))


def read_text(path: Path) -> str:
    return checked.read_text(path, missing="give a file of faults", example=_EXAMPLE)


def loads(text: str, where: str) -> FaultPlan:
    """The fault plan in a TOML text. Errors begin with `where` and the line."""
    return checked.from_toml(text, FaultPlan, where, example=_EXAMPLE)


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
