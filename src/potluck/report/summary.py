"""A run in numbers, from its events.jsonl: steps, who computed how much, what it gained, what it cost."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from msgspec import Struct

from potluck.errors import RunFolderError
from potluck.report.text import clean
from potluck.spec.events import (
    ContributionDropped,
    GuestCodec,
    GuestLeft,
    GuestLost,
    LeaseTakenBack,
    MachineFigures,
    RunEnded,
    RunEvent,
    RunStarted,
    StatisticsMeasured,
    StepEnded,
    StrangerRefused,
)
from potluck.train.events import events_in
from potluck.train.gain import Gain

EVENTS_FILE = "events.jsonl"
LEAST_TO_ADD = 0.02
"""Where guests could add less than this part of the host's speed, nobody can say how much of it arrived."""


class MachineSummary(Struct, frozen=True, kw_only=True):
    """One machine's part in the run."""

    name: str
    role: str
    device: str
    samples: int
    share: float
    steps: int
    """Steps in which it brought at least one sample."""
    micro_batch: int | None
    """Most samples that it computed at once, the median over its steps."""
    rate: float | None
    """Samples per second while it computes, the median over its steps."""
    busy: float | None
    taken_back_samples: int
    dropped_samples: int
    times_lost: int


class Summary(Struct, frozen=True, kw_only=True):
    """A run in numbers; None where the log does not say."""

    run_id: str
    recipe: str
    parameters: int | None
    steps: int
    planned_steps: int | None
    first_loss: float | None
    last_loss: float | None
    """None if the last step's was not finite."""
    not_applied: int
    """Steps whose gradient was not finite: their updates were not made."""
    ended: str
    """finished, interrupted, failed, or 'still going or killed' if the log has no end."""
    run_s: float
    """Seconds of the run, as its last line says; of a resumed run, of all its parts."""
    seconds: float
    """Sum of the steps' seconds."""
    samples: int
    samples_per_s: float | None
    tokens_per_s: float | None
    mean_step_s: float | None
    """Seconds a step, the mean."""
    step_s: float | None
    """Seconds a step, the median."""
    predicted_s: float | None
    """Seconds that the host expected of a step, its update included: the median over the steps that had one."""
    off: float | None
    """Measured ÷ predicted − 1 of those steps, the median."""
    speedup: float | None
    """Over the host alone: the mean of the steps' speed-ups, weighted by their seconds."""
    efficiency: float | None
    """Samples per second ÷ the sum of what each machine reaches alone."""
    recovery: float | None
    """(speed-up − 1) ÷ Σ(guest rate ÷ host rate): how much of what the guests could bring arrived. None where they
    could bring less than a fiftieth of the host's speed: the ratio would be noise."""
    could_add: float | None
    """Σ(guest rate ÷ host rate), the median over the steps."""
    wait_s: float
    update_s: float
    bytes_up: int
    bytes_down: int
    ahead_samples: int
    """Leased samples that had been sent before their lease."""
    unneeded_samples: int
    """Samples sent ahead that their guest was not lent."""
    unneeded_bytes: int
    dropped_samples: int
    strangers_refused: int
    batch_layers: int
    """Layers that normalise over the batch (BatchNorm)."""
    effective_batch: float | None
    """With such layers: samples ÷ micro-batches of a step, the median. So many samples share their statistics."""
    machines: tuple[MachineSummary, ...]
    codecs: dict[str, str] = {}
    """With codec auto, each guest's last codec and why."""
    planned_s: float | None = None
    """Seconds a step that a plan saved before the run predicted."""


_Kind = TypeVar("_Kind", RunStarted, RunEnded, StatisticsMeasured)


def read_events(run: Path) -> list[RunEvent]:
    """The run's events in order; see `events_in`."""
    path = run / EVENTS_FILE
    try:
        return events_in(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(
            f"{run} is not a run folder: it has no {EVENTS_FILE}",
            hint="name the folder that a run printed at its end, such as runs/<id>",
        ) from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}", hint="check its permissions") from error


def step_events(events: Iterable[RunEvent]) -> list[StepEnded]:
    """One event per step. A resumed run repeats the steps after its checkpoint; the last time counts."""
    by_step = {event.step: event for event in events if isinstance(event, StepEnded)}
    return [by_step[step] for step in sorted(by_step)]


def losses(events: Iterable[RunEvent]) -> tuple[list[int], list[float]]:
    """Steps and their losses, for the curve."""
    known = [(e.step, e.loss) for e in step_events(events) if e.loss is not None]
    return [step for step, _ in known], [loss for _, loss in known]


def summarize(events: Sequence[RunEvent]) -> Summary:
    steps = step_events(events)
    start, statistics = _last(events, RunStarted), _last(events, StatisticsMeasured)
    seconds = math.fsum(e.step_s for e in steps)
    machines = _machines(events, steps)
    samples = sum(m.samples for m in machines)
    samples_per_s = samples / seconds if seconds else None
    tokens = start.tokens_per_sample if start is not None else None
    _, curve = losses(events)
    gain = Gain()
    for step in steps:
        gain.add(step.speedup, step.step_s)
    return Summary(
        run_id=clean(start.run_id) if start is not None else "",
        recipe=clean(start.recipe) if start is not None else "",
        parameters=start.parameters or None if start is not None else None,
        steps=steps[-1].step if steps else 0,
        planned_steps=start.steps or None if start is not None else None,
        first_loss=curve[0] if curve else None,
        last_loss=steps[-1].loss if steps else None,
        not_applied=sum(not e.applied for e in steps),
        ended=_ended(events),
        run_s=_run_s(events),
        seconds=seconds,
        samples=samples,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
        mean_step_s=seconds / len(steps) if steps else None,
        step_s=_median(e.step_s for e in steps),
        predicted_s=_median(_predicted_s(e) for e in steps),
        off=_median(_off(e) for e in steps),
        speedup=gain.value,
        efficiency=_efficiency(steps),
        recovery=_recovery(steps),
        could_add=_median(_could_add(e) for e in steps),
        wait_s=math.fsum(e.wait_s for e in steps),
        update_s=math.fsum(e.update_s for e in steps),
        bytes_up=sum(e.bytes_up for e in steps),
        bytes_down=sum(e.bytes_down for e in steps),
        ahead_samples=sum(e.ahead for e in steps),
        unneeded_samples=sum(e.unneeded for e in steps),
        unneeded_bytes=sum(e.unneeded_bytes for e in steps),
        dropped_samples=sum(e.dropped for e in steps),
        strangers_refused=sum(isinstance(e, StrangerRefused) for e in events),
        batch_layers=statistics.layers if statistics is not None else 0,
        effective_batch=_median(_effective_batch(e) for e in steps) if statistics is not None else None,
        machines=machines,
        codecs={
            clean(e.machine): f"{clean(e.codec)}, {clean(e.reason)}" for e in events if isinstance(e, GuestCodec)
        },
    )


def _last(events: Sequence[RunEvent], kind: type[_Kind]) -> _Kind | None:
    return next((e for e in reversed(events) if isinstance(e, kind)), None)


def _ended(events: Sequence[RunEvent]) -> str:
    # A resumed run has several starts; an end before the last of them is not the end.
    last = next((e for e in reversed(events) if isinstance(e, (RunStarted, RunEnded))), None)
    return (clean(last.reason) or "ended") if isinstance(last, RunEnded) else "still going or killed"


def _run_s(events: Sequence[RunEvent]) -> float:
    """From each start to its end, or to the last event before the next start."""
    total = 0.0
    for i, event in enumerate(events):
        if isinstance(event, RunStarted):
            later = itertools.takewhile(lambda e: not isinstance(e, RunStarted), events[i + 1 :])
            end = event.t_s
            for other in later:
                end = max(end, other.t_s)
                if isinstance(other, RunEnded):
                    end = event.t_s + other.seconds
                    break
            total += end - event.t_s
    return total


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return median(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _effective_batch(step: StepEnded) -> float | None:
    parts = sum(m.micro_batches for m in step.machines)
    return sum(m.samples for m in step.machines) / parts if parts else None


def _machines(events: Sequence[RunEvent], steps: Sequence[StepEnded]) -> tuple[MachineSummary, ...]:
    """The host first, then the guests by the samples they computed."""
    seen: dict[str, list[MachineFigures]] = {}
    for step in steps:
        for machine in step.machines:
            seen.setdefault(machine.name, []).append(machine)
    taken_back, dropped, lost = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        match event:
            case LeaseTakenBack():
                taken_back[event.machine] += event.samples
            case ContributionDropped():
                dropped[event.machine] += event.samples
            case GuestLost() | GuestLeft():
                taken_back[event.machine] += event.samples_taken_back
                lost[event.machine] += isinstance(event, GuestLost)
    total = sum(row.samples for rows in seen.values() for row in rows)
    machines = []
    for name, rows in seen.items():
        samples = sum(row.samples for row in rows)
        active = [row for row in rows if row.samples]
        machines.append(
            MachineSummary(
                name=clean(name),
                role=rows[-1].role,
                device=clean(rows[-1].device),
                samples=samples,
                share=samples / total if total else 0.0,
                steps=len(active),
                micro_batch=_whole(_median(row.micro_batch for row in active)),
                rate=_median(row.rate for row in active),
                busy=_median(row.busy for row in active),
                taken_back_samples=taken_back[name],
                dropped_samples=dropped[name],
                times_lost=lost[name],
            )
        )
    return tuple(sorted(machines, key=lambda m: (m.role != "host", -m.samples)))


def _present(step: StepEnded) -> list[MachineFigures]:
    """Who could have helped in this step. To leave out one that sat out would flatter the numbers."""
    return [m for m in step.machines if m.samples or m.state in ("computing", "late", "sitting out")]


def _predicted_s(step: StepEnded) -> float | None:
    """The shares' time and the update after it."""
    return None if step.predicted_s is None else step.predicted_s + step.update_s


def _off(step: StepEnded) -> float | None:
    predicted_s = _predicted_s(step)
    return step.step_s / predicted_s - 1 if predicted_s else None


def _efficiency(steps: Sequence[StepEnded]) -> float | None:
    """Over the steps in which every machine's own rate was known."""
    done = possible = 0.0
    for step in steps:
        rates = [m.rate for m in _present(step)]
        known = [rate for rate in rates if rate is not None]
        if step.step_s and known and len(known) == len(rates):
            done += sum(m.samples for m in _present(step))
            possible += step.step_s * sum(known)
    return done / possible if possible else None


def _could_add(step: StepEnded) -> float | None:
    """What the guests of a step could bring, as a part of the host's speed."""
    rates = {"host": 0.0, "guest": 0.0}
    for machine in _present(step):
        rates[machine.role] += machine.rate or 0.0
    return rates["guest"] / rates["host"] if all(rates.values()) else None


def _recovery(steps: Sequence[StepEnded]) -> float | None:
    possible = [(step.speedup, _could_add(step)) for step in steps]
    return _median((s - 1) / more for s, more in possible if s is not None and more and more >= LEAST_TO_ADD)
