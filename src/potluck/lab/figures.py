"""The figures of the lab: turns the outcomes of strategies on a rig into comparable rows. PURE.

    efficiency   samples/s of the fleet ÷ the sum of the samples/s that each machine reaches alone
    recovery     (speed-up − 1) ÷ Σ(guest speed ÷ host speed): share of the guests' possible gain

The first steps are warm-up and count only for `samples_per_step`. None means not measured.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from potluck.lab.aftermath import aftermath
from potluck.plan import about
from potluck.spec.fleet import SOLO
from potluck.spec.outcome import Outcome, StepDone
from potluck.spec.results import Results, Row
from potluck.spec.rig import Machine, Rig

BUSY_BOX = 1.25
"""A host that is alone and this much slower than its pace is short of processor time. With twenty programs beside
it, its steps of 7.2 s took 12 to 68 s, and each row measured the box at a time of its own."""


def results(
    rig: Rig,
    outcomes: Sequence[Outcome],
    alone: Mapping[str, float],
    host_step_s: float,
    warm_up: int,
    box: str = "",
    predicted: Mapping[str, float] | None = None,
) -> Results:
    """The rows of all outcomes. `predicted`: step time by strategy."""
    rows = (row(rig, outcome, alone, host_step_s, warm_up) for outcome in outcomes)
    return Results(
        rig=rig,
        rows=tuple(replace(r, predicted_s=(predicted or {}).get(r.strategy)) for r in rows),
        ideal_speedup=ideal_speedup(rig, alone, warm_up),
        warm_up_steps=warm_up,
        alone=dict(alone),
        box=box,
        notes=_notes(rig, outcomes, host_step_s),
        gradient_ratio={guest.name: about.gradient_ratio(rig, guest) for guest in rig.guests},
        faults=next((found for o in outcomes if (found := aftermath(o, warm_up)) is not None), None),
    )


def _notes(rig: Rig, outcomes: Sequence[Outcome], host_step_s: float) -> dict[str, str]:
    notes = {outcome.strategy: outcome.note for outcome in outcomes if outcome.note}
    paced_s = about.host_step_s(rig)
    if paced_s is not None and host_step_s > BUSY_BOX * paced_s:
        notes[SOLO] = (
            f"its steps took {host_step_s / paced_s:.1f} times what the rig says: this box is too slow for it, or "
            "has other work. Rows are measured one after the other: do not compare them, run it on an idle machine"
        )
    return notes


def row(rig: Rig, outcome: Outcome, alone: Mapping[str, float], host_step_s: float, warm_up: int) -> Row:
    """One strategy's figures. `alone`: samples/s by machine; `host_step_s`: step time of the host alone.

    A strategy that was stopped early because its steps took too long has a shorter warm-up and no final loss.
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
        loss=outcome.steps[-1].loss
        if outcome.steps and not cut_short and math.isfinite(outcome.steps[-1].loss)
        else None,
        samples_per_step=(min(samples), max(samples)) if samples else None,
    )


def mean_step_s(outcome: Outcome, warm_up: int) -> float | None:
    """Mean step time after the warm-up; None if no step follows it."""
    count = len(outcome.steps) - warm_up
    if count < 1:
        return None
    seconds = outcome.steps[-1].ended_at - _began(outcome, warm_up)
    return seconds / count if seconds > 0 else None


def ideal_speedup(rig: Rig, alone: Mapping[str, float] | None = None, warm_up: int = 0) -> float | None:
    """The speed-up over the measured steps if every machine computed all the time at its speed of each step.

    Uses the speeds measured alone if there is one for every machine, else those of the rig.
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
    """Samples of the measured steps ÷ samples that all machines could have computed in the same time."""
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

    A machine that the strategy uses counts while it was present. One that it does not use counts while the rig has
    it: otherwise the host alone would be 100 % efficient.
    """
    return machine.name in step.present if machine.name in ever else machine.present_at(step.step)


def _speed_at(machine: Machine, step: int, alone: Mapping[str, float]) -> float:
    """Samples/s in a step: the speed measured alone, scaled by the rig's speed changes."""
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
    """The counter at a time, interpolated linearly between two readings."""
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
    """The quotient; None if the divisor is near zero, where it would consist of rounding errors."""
    if below is None or abs(below) < 1e-9 or not math.isfinite(above) or not math.isfinite(below):
        return None
    return above / below
