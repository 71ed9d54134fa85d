"""The figures of strategies on a rig: the content of the lab's `results.json`. PURE. None means not measured."""

from __future__ import annotations

from msgspec import Struct

from potluck.spec.outcome import FaultDone
from potluck.spec.rig import Rig


class Row(Struct, frozen=True, kw_only=True):
    """One strategy on one rig. Programs read these names from JSON: do not rename them."""

    strategy: str
    step_s: float | None
    """Mean step time."""
    samples_per_s: float | None
    speedup: float | None
    """Step time of the host alone ÷ step time of this strategy."""
    efficiency: float | None
    recovery: float | None
    bytes_per_step: float | None
    """Bytes over the host's link in both directions together."""
    loss: float | None
    """Loss of the last step."""
    samples_per_step: tuple[int, int] | None
    """Fewest and most samples of all steps: equal if none is lost or counted twice."""
    predicted_s: float | None = None
    """Mean step time predicted by the plan from the rig alone."""


class Aftermath(Struct, frozen=True, kw_only=True):
    """The faults of one run and their effect. Programs read these names from JSON: do not rename them."""

    applied: tuple[FaultDone, ...]
    """The faults that happened; their times are seconds since the first step began."""
    missed: int
    """Number of planned faults that did not happen because the run was over."""
    taken_back_samples: int
    """Samples taken back from late or lost guests; the host or another guest computed them."""
    lost: dict[str, int]
    """How often each guest was lost."""
    rejoined: dict[str, int]
    longest_absence_s: float | None
    """Longest time from a guest's loss to its return."""
    slowest_step_s: float | None
    """Duration of the slowest step since the first fault."""
    slowest_step: int | None
    median_step_s: float | None
    """Median duration of the steps after the warm-up."""


class Results(Struct, frozen=True, kw_only=True):
    """The rows of all strategies on one rig: the content of `results.json` and of `--json`."""

    rig: Rig
    rows: tuple[Row, ...]
    ideal_speedup: float | None
    """From the measured speeds of each machine alone; from the rig's speeds if some are missing."""
    warm_up_steps: int
    alone: dict[str, float]
    """Measured samples/s of each machine alone."""
    box: str = ""
    """How the rig was emulated."""
    notes: dict[str, str] = {}
    """Remarks on a row, by strategy."""
    faults: Aftermath | None = None
    """Injected faults and their effect; None without faults."""
    gradient_ratio: dict[str, float | None] = {}
    """Time to send fp32 gradients over each guest's link ÷ step time of the host alone."""
