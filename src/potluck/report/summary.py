"""What happened in a run, from its events.jsonl: steps, who computed how much, what it gained, what it cost.

It reads the log as it is, also one that ends in the middle of a line; it does not know the run's checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from potluck.errors import RunFolderError
from potluck.report.text import clean, integer, number
from potluck.train.events import events_in

Event = Mapping[str, Any]

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSummary:
    """One machine's part in the run."""

    name: str
    role: str
    device: str
    samples: int
    share: float
    steps: int
    """Steps in which it brought at least one sample."""
    micro_batch: int | None
    """The most samples that it computed at once, the median over its steps."""
    rate: float | None
    """Samples per second while it computes, the median over its steps."""
    busy: float | None
    taken_back_samples: int
    dropped_samples: int
    times_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers; None where the log does not say."""

    run_id: str
    recipe: str
    parameters: int | None
    steps: int
    planned_steps: int | None
    first_loss: float | None
    last_loss: float | None
    """None where the last step's was not finite, whatever came before."""
    not_applied: int
    """Steps whose gradient was not finite: their updates were not made."""
    ended: str
    """finished, interrupted, failed, or 'still going or killed' where the log has no end."""
    seconds: float
    """The steps' own time, all together."""
    samples: int
    samples_per_s: float | None
    tokens_per_s: float | None
    step_s: float | None
    """The median."""
    predicted_s: float | None
    """What the host's formula expected of a step, its update included: the median over the steps that had one."""
    off: float | None
    """Measured ÷ predicted − 1 of those steps, the median."""
    speedup: float | None
    """Against the host alone."""
    efficiency: float | None
    """Samples per second ÷ the sum of what each machine reaches alone."""
    recovery: float | None
    """(speed-up − 1) ÷ Σ(guest rate ÷ host rate): how much of what the guests could bring arrived."""
    wait_s: float
    update_s: float
    bytes_up: int
    bytes_down: int
    dropped_samples: int
    strangers_refused: int
    batch_layers: int
    """Layers that normalise over the batch (BatchNorm)."""
    effective_batch: float | None
    """Where there are such: samples ÷ micro-batches of a step, the median; so many share their statistics."""
    machines: tuple[MachineSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_events(run: Path) -> list[dict[str, Any]]:
    """The run's events in order, without lines that are no event: a killed run may end in half a line."""
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


def step_events(events: Iterable[Event]) -> list[Event]:
    """One event per step. A resumed run repeats the steps after its checkpoint; the last time counts."""
    by_step: dict[int, Event] = {}
    for event in events:
        if event.get("event") == "step":
            by_step[integer(event, "step")] = event
    return [by_step[step] for step in sorted(by_step)]


def losses(events: Iterable[Event]) -> tuple[list[int], list[float]]:
    """Steps and their losses, for the curve."""
    pairs = [(integer(e, "step"), number(e, "loss")) for e in step_events(events)]
    known = [(step, loss) for step, loss in pairs if loss is not None]
    return [step for step, _ in known], [loss for _, loss in known]


def summarize(events: Sequence[Event]) -> Summary:
    steps = step_events(events)
    start = _last(events, "run_start")
    end = _last(events, "run_end")
    # A resumed run has several starts; an end before the last of them is not the end.
    ended = events.index(end) > events.index(start) if end and start else bool(end)
    seconds = math.fsum(number(e, "step_s") or 0.0 for e in steps)
    machines = _machines(events, steps)
    samples = sum(m.samples for m in machines) or integer(start, "global_batch") * len(steps)
    samples_per_s = samples / seconds if seconds else None
    tokens = number(start, "tokens_per_sample")
    _, curve = losses(events)
    return Summary(
        run_id=clean(start.get("run_id")),
        recipe=clean(start.get("recipe")),
        parameters=integer(start, "parameters") or None,
        steps=integer(steps[-1], "step") if steps else 0,
        planned_steps=integer(start, "steps") or None,
        first_loss=curve[0] if curve else None,
        last_loss=number(steps[-1], "loss") if steps else None,
        not_applied=sum(e.get("applied") is False for e in steps),
        ended=(clean(end.get("reason")) or "ended") if ended else "still going or killed",
        seconds=seconds,
        samples=samples,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
        step_s=_median(number(e, "step_s") for e in steps),
        predicted_s=_median(_predicted_s(e) for e in steps),
        off=_median(_off(e) for e in steps),
        speedup=_median(number(e, "speedup") for e in steps),
        efficiency=_efficiency(steps),
        recovery=_recovery(steps),
        wait_s=math.fsum(number(e, "wait_s") or 0.0 for e in steps),
        update_s=math.fsum(number(e, "update_s") or 0.0 for e in steps),
        bytes_up=sum(integer(e, "bytes_up") for e in steps),
        bytes_down=sum(integer(e, "bytes_down") for e in steps),
        dropped_samples=sum(integer(e, "dropped") for e in steps),
        strangers_refused=sum(e.get("event") == "refused_stranger" for e in events),
        batch_layers=integer(_last(events, "batch_statistics"), "layers"),
        effective_batch=_effective_batch(events, steps),
        machines=machines,
    )


def _last(events: Sequence[Event], kind: str) -> Event:
    return next((e for e in reversed(events) if e.get("event") == kind), {})


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return median(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _effective_batch(events: Sequence[Event], steps: Sequence[Event]) -> float | None:
    if not _last(events, "batch_statistics"):
        return None
    values: list[float | None] = []
    for step in steps:
        rows = [m for m in step.get("machines") or () if isinstance(m, Mapping)]
        parts = sum(integer(m, "micro_batches") for m in rows)
        values.append(sum(integer(m, "samples") for m in rows) / parts if parts else None)
    return _median(values)


def _machines(events: Sequence[Event], steps: Sequence[Event]) -> tuple[MachineSummary, ...]:
    """The host first, then the guests by what they brought."""
    seen: dict[str, list[Event]] = {}
    for step in steps:
        for machine in step.get("machines") or ():
            if isinstance(machine, Mapping):
                seen.setdefault(clean(machine.get("name")), []).append(machine)
    taken_back, dropped, lost = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        name = clean(event.get("machine"))
        if event.get("event") == "lease_taken_back":
            taken_back[name] += integer(event, "samples")
        elif event.get("event") == "contribution_dropped":
            dropped[name] += integer(event, "samples")
        elif event.get("event") in ("guest_lost", "guest_left"):
            taken_back[name] += integer(event, "samples_taken_back")
            lost[name] += event.get("event") == "guest_lost"
    total = sum(integer(row, "samples") for rows in seen.values() for row in rows)
    machines = []
    for name, rows in seen.items():
        samples = sum(integer(row, "samples") for row in rows)
        active = [row for row in rows if integer(row, "samples")]
        machines.append(
            MachineSummary(
                name=name,
                role=clean(rows[-1].get("role")),
                device=clean(rows[-1].get("device")),
                samples=samples,
                share=samples / total if total else 0.0,
                steps=len(active),
                micro_batch=_whole(_median(number(row, "micro_batch") for row in active)),
                rate=_median(number(row, "rate") for row in active),
                busy=_median(number(row, "busy") for row in active),
                taken_back_samples=taken_back[name],
                dropped_samples=dropped[name],
                times_lost=lost[name],
            )
        )
    return tuple(sorted(machines, key=lambda m: (m.role != "host", -m.samples)))


def _present(step: Event) -> list[Event]:
    """Who could have helped in this step. To leave out one that sat out would flatter the numbers."""
    rows = [m for m in step.get("machines") or () if isinstance(m, Mapping)]
    return [m for m in rows if integer(m, "samples") or m.get("state") in ("computing", "late", "sitting out")]


def _predicted_s(step: Event) -> float | None:
    """The shares' time and the update after it."""
    predicted_s = number(step, "predicted_s")
    return None if predicted_s is None else predicted_s + (number(step, "update_s") or 0.0)


def _off(step: Event) -> float | None:
    predicted_s, step_s = _predicted_s(step), number(step, "step_s")
    return step_s / predicted_s - 1 if predicted_s and step_s is not None else None


def _efficiency(steps: Sequence[Event]) -> float | None:
    """Over the steps in which every machine's own rate was known."""
    done = possible = 0.0
    for step in steps:
        rates = [number(m, "rate") for m in _present(step)]
        known = [rate for rate in rates if rate is not None]
        step_s = number(step, "step_s")
        if step_s and known and len(known) == len(rates):
            done += sum(integer(m, "samples") for m in _present(step))
            possible += step_s * sum(known)
    return done / possible if possible else None


def _recovery(steps: Sequence[Event]) -> float | None:
    values: list[float | None] = []
    for step in steps:
        speedup = number(step, "speedup")
        rates = {"host": 0.0, "guest": 0.0}
        for machine in _present(step):
            rates["host" if machine.get("role") == "host" else "guest"] += number(machine, "rate") or 0.0
        if speedup is not None and all(rates.values()):
            values.append((speedup - 1) / (rates["guest"] / rates["host"]))
    return _median(values)
