"""What a strategy did on a rig, step by step: the raw data of tables and plots.

All times are seconds of one computer's monotonic clock, which every emulated machine shares.
"""

from __future__ import annotations

from msgspec import Struct

from potluck.bounds import Finite, Natural


class StepDone(Struct, frozen=True, kw_only=True):
    """One optimizer update."""

    step: int
    """Number of the step, counted from 1."""
    ended_at: float
    step_s: float
    loss: float
    samples: dict[str, int]
    """Samples counted for each machine."""
    present: tuple[str, ...]
    """The machines that were present."""


class TracedInterval(Struct, frozen=True, kw_only=True):
    """A line of the file that POTLUCK_TRACE names: a process computed."""

    start: Finite
    end: Finite
    samples: Natural
    """0 if the micro-batch then waited for the network and continued later."""


class Interval(Struct, frozen=True, kw_only=True):
    """A time in which one machine did one thing."""

    machine: str
    kind: str
    """compute, send or receive; a machine that does not compute waits."""
    start: float
    end: float


class FaultDone(Struct, frozen=True, kw_only=True):
    """A fault that was injected."""

    machine: str
    kind: str
    step: int
    """The step in which it happened."""
    start: float
    end: float
    """The same as `start` for a momentary fault."""
    text: str
    """A description of what happened."""


class Incident(Struct, frozen=True, kw_only=True):
    """An event about a guest in the host's log."""

    machine: str
    kind: str
    """guest_joined, guest_lost, guest_left, guest_refused or lease_taken_back."""
    at: float
    step: int
    """The step in which it happened."""
    samples: int = 0
    """Samples that were taken back."""


class Outcome(Struct, frozen=True, kw_only=True):
    """One strategy's run."""

    strategy: str
    started_at: float
    """When training began; loss is plotted against the time since then."""
    steps: list[StepDone]
    intervals: list[Interval] = []
    host_bytes: list[tuple[float, int]] = []
    """(time, bytes that had crossed the host's link by then, both directions)."""
    note: str = ""
    """A remark on its row."""
    faults: list[FaultDone] = []
    incidents: list[Incident] = []
    """Events since the first fault; empty without faults."""
    faults_missed: int = 0
    """Number of planned faults that did not happen because the run was over."""
