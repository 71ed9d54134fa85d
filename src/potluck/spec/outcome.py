"""What a strategy did on a rig, step by step, as plain data: written by whoever ran it, read by tables and plots.

Holds no figure that can be computed from another; those are the figures' affair. All times are seconds of one box's
monotonic clock, which every emulated machine shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimizer update."""

    step: int
    """Counted from 1."""
    ended_at: float
    step_s: float
    loss: float
    samples: dict[str, int]
    """By machine."""
    present: tuple[str, ...]
    """The machines that were there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One machine did one thing for a while."""

    machine: str
    kind: str
    """compute, send or receive; whoever does not compute waits."""
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDone:
    """Something went wrong on purpose."""

    machine: str
    kind: str
    step: int
    """The step that was under way."""
    start: float
    end: float
    """The same as its start where it takes no time."""
    text: str
    """What happened, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What the host told of a guest in its log."""

    machine: str
    kind: str
    """guest_joined, guest_lost, guest_left, guest_refused or lease_taken_back."""
    at: float
    step: int
    """The step that was under way."""
    samples: int = 0
    """That were taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy's run."""

    strategy: str
    started_at: float
    """When training began: loss is plotted against the time since."""
    steps: list[StepDone]
    intervals: list[Interval] = field(default_factory=list)
    host_bytes: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes that had crossed the host's link by then, both directions)."""
    note: str = ""
    """What a reader of its row should know."""
    faults: list[FaultDone] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    """From the first fault on; empty where there was none."""
    faults_missed: int = 0
    """Planned ones whose time never came: the run was over."""
