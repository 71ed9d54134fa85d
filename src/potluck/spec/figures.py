"""The figures of the lab: from what strategies did on a rig to the rows that people compare.

PURE: outcomes and measured speeds in, numbers out. It does not know how anything was run, nor how it is shown.

    efficiency   samples/s of the fleet ÷ the sum of the samples/s that each machine reaches alone
    recovery     (speed-up − 1) ÷ Σ(guest speed ÷ host speed): how much of what the guests could bring arrived

The first steps are warm-up and count for nothing but `samples_per_step`. What was not measured is None.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from potluck.spec import about
from potluck.spec.aftermath import Aftermath, aftermath
from potluck.spec.outcome import Outcome, StepDone
from potluck.spec.rig import Machine, Rig, to_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on one rig. The names are a format: programs read them."""

    strategy: str
    step_s: float | None
    """Mean seconds of a step."""
    samples_per_s: float | None
    speedup: float | None
    """The host alone's step_s ÷ this one's."""
    efficiency: float | None
    recovery: float | None
    bytes_per_step: float | None
    """That crossed the host's link, both directions together."""
    loss: float | None
    """Of the last step."""
    samples_per_step: tuple[int, int] | None
    """The fewest and the most, of all steps: equal where nothing is lost or counted twice."""
    predicted_s: float | None = None
    """Mean seconds of a step, as the plan had it from the rig alone."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: no tuple, no NaN."""
        table = {key: _finite(value) for key, value in dataclasses.asdict(self).items()}
        span = self.samples_per_step
        return {**table, "samples_per_step": None if span is None else list(span)}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Row:
        span = table["samples_per_step"]
        return cls(**{**table, "samples_per_step": None if span is None else (span[0], span[1])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All strategies on one rig: what tables and files are made of."""

    rig: Rig
    rows: tuple[Row, ...]
    ideal_speedup: float | None
    """From the speeds measured alone, over the measured steps; from the rig's own where some are missing."""
    warm_up_steps: int
    alone: dict[str, float]
    """Samples/s of each machine by itself, measured."""
    box: str = ""
    """How the rig was emulated."""
    notes: dict[str, str] = field(default_factory=dict)
    """What a reader of a row should know, by strategy."""
    faults: Aftermath | None = None
    """What went wrong on purpose, and what became of it; None where nothing was to."""


def results(
    rig: Rig,
    outcomes: Sequence[Outcome],
    alone: Mapping[str, float],
    host_step_s: float,
    warm_up: int,
    box: str = "",
    predicted: Mapping[str, float] | None = None,
) -> Results:
    """Every outcome's row, and what stands around them. `predicted`: seconds of a step, by strategy."""
    rows = (row(rig, outcome, alone, host_step_s, warm_up) for outcome in outcomes)
    return Results(
        rig=rig,
        rows=tuple(dataclasses.replace(r, predicted_s=(predicted or {}).get(r.strategy)) for r in rows),
        ideal_speedup=ideal_speedup(rig, alone, warm_up),
        warm_up_steps=warm_up,
        alone=dict(alone),
        box=box,
        notes={outcome.strategy: outcome.note for outcome in outcomes if outcome.note},
        faults=next((found for o in outcomes if (found := aftermath(o, warm_up)) is not None), None),
    )


def to_json(of: Results) -> dict[str, Any]:
    """What `--json` writes. NaN is no JSON: it becomes null. Without faults there is no such key."""
    faults = {} if of.faults is None else {"faults": of.faults.to_dict()}
    return {
        "rig": to_table(of.rig),
        "ideal_speedup": _finite(of.ideal_speedup),
        "rows": [row.to_dict() for row in of.rows],
        "warm_up_steps": of.warm_up_steps,
        "steps": of.rig.workload.steps,
        "alone": {name: _finite(rate) for name, rate in of.alone.items()},
        "box": of.box,
        "gradient_ratio": {guest.name: about.gradient_ratio(of.rig, guest) for guest in of.rig.guests},
        "notes": of.notes,
        **faults,
    }


def row(rig: Rig, outcome: Outcome, alone: Mapping[str, float], host_step_s: float, warm_up: int) -> Row:
    """One strategy's figures. `alone`: samples/s by machine; `host_step_s`: a step of the host alone.

    A strategy that made fewer steps than the rig has (each took too long) has a shorter warm-up, and no final loss.
    """
    cut_short = len(outcome.steps) < rig.workload.steps
    if cut_short:
        warm_up = min(warm_up, max(1, len(outcome.steps) // 3))
    step_s = mean_step_s(outcome, warm_up)
    measured = outcome.steps[warm_up:]
    samples = [sum(step.samples.values()) for step in outcome.steps]
    samples_per_s = None
    if step_s is not None:
        samples_per_s = sum(samples[warm_up:]) / (step_s * len(measured))
    speedup = _ratio(host_step_s, step_s)
    ideal = ideal_speedup(rig, alone, warm_up)
    return Row(
        strategy=outcome.strategy,
        step_s=step_s,
        samples_per_s=samples_per_s,
        speedup=speedup,
        efficiency=_efficiency(rig, outcome, alone, warm_up),
        recovery=None if speedup is None or ideal is None else _ratio(speedup - 1, ideal - 1),
        bytes_per_step=_bytes_per_step(outcome, warm_up),
        loss=_finite(outcome.steps[-1].loss) if outcome.steps and not cut_short else None,
        samples_per_step=(min(samples), max(samples)) if samples else None,
    )


def mean_step_s(outcome: Outcome, warm_up: int) -> float | None:
    """Seconds a step, from the end of the warm-up to the end of the last step; None where no step follows it."""
    count = len(outcome.steps) - warm_up
    if count < 1:
        return None
    seconds = outcome.steps[-1].ended_at - _began(outcome, warm_up)
    return seconds / count if seconds > 0 else None


def ideal_speedup(rig: Rig, alone: Mapping[str, float] | None = None, warm_up: int = 0) -> float | None:
    """The speed-up if every machine computed all the time: over the measured steps, at the speeds of each moment.

    From the speeds measured alone where all are there, else from those that the rig describes.
    """
    steps = range(warm_up + 1, rig.workload.steps + 1) or range(1, 2)
    measured = [_positive((alone or {}).get(machine.name)) for machine in rig.machines]
    if any(rate is None for rate in measured):
        return about.ideal_speedup(rig, steps)
    times, together = [], []
    for step in range(1, 2) if rig.steady else steps:
        here = [m for m in rig.machines if m.present_at(step)]
        speeds = {m.name: _speed_at(m, step, alone or {}) for m in here}
        times.append(1 / speeds[rig.host.name])
        together.append(1 / math.fsum(speeds.values()))
    return math.fsum(times) / math.fsum(together)


def _efficiency(rig: Rig, outcome: Outcome, alone: Mapping[str, float], warm_up: int) -> float | None:
    """Samples of the measured steps ÷ those that all machines could have computed in the same time."""
    step_s = mean_step_s(outcome, warm_up)
    if step_s is None or any(_positive(alone.get(m.name)) is None for m in rig.machines):
        return None
    measured = outcome.steps[warm_up:]
    done = sum(sum(step.samples.values()) for step in measured)
    if rig.steady:
        return done / (step_s * len(measured) * math.fsum(alone[m.name] for m in rig.machines))
    ever = {name for step in outcome.steps for name in step.present}
    possible = []
    began = _began(outcome, warm_up)
    for step in measured:
        here = [m for m in rig.machines if _counts(m, step, ever)]
        possible.append((step.ended_at - began) * math.fsum(_speed_at(m, step.step, alone) for m in here))
        began = step.ended_at
    return _ratio(done, math.fsum(possible))


def _counts(machine: Machine, step: StepDone, ever: set[str]) -> bool:
    """Whether a machine could have computed in a step.

    One that the strategy uses: when it was there. One that the strategy does without counts all the same while the
    rig has it, as it does where the fleet is steady: the host alone is not efficient because nobody else was asked.
    """
    return machine.name in step.present if machine.name in ever else machine.present_at(step.step)


def _speed_at(machine: Machine, step: int, alone: Mapping[str, float]) -> float:
    """Samples/s in a step: as measured alone, which is at the first speed, and as the rig says that it changes."""
    first, now = machine.seconds_per_sample, machine.seconds_per_sample_at(step)
    return alone[machine.name] * (first / now if first is not None and now is not None else 1.0)


def _began(outcome: Outcome, warm_up: int) -> float:
    return outcome.steps[warm_up - 1].ended_at if warm_up else outcome.started_at


def _bytes_per_step(outcome: Outcome, warm_up: int) -> float | None:
    count = len(outcome.steps) - warm_up
    if count < 1 or not outcome.host_bytes:
        return None
    first, last = _began(outcome, warm_up), outcome.steps[-1].ended_at
    return (_bytes_at(outcome.host_bytes, last) - _bytes_at(outcome.host_bytes, first)) / count


def _bytes_at(readings: Sequence[tuple[float, int]], time_s: float) -> float:
    """The counter at a moment, by a straight line between the readings around it."""
    after = bisect.bisect_left(readings, time_s, key=lambda reading: reading[0])
    if after == 0:
        return readings[0][1]
    if after == len(readings):
        return readings[-1][1]
    (t0, b0), (t1, b1) = readings[after - 1], readings[after]
    return b0 + (b1 - b0) * (time_s - t0) / (t1 - t0)


def _positive(rate: float | None) -> float | None:
    return rate if rate is not None and 0 < rate < math.inf else None


def _ratio(above: float, below: float | None) -> float | None:
    """None where the quotient says nothing: guests that bring nothing leave rounding errors, not a zero."""
    if below is None or abs(below) < 1e-9 or not math.isfinite(above) or not math.isfinite(below):
        return None
    return above / below


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
