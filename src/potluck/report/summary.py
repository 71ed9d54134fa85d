"""A run's figures, from its events.jsonl: steps, each machine's samples, the gain and the cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from potluck.errors import RunFolderError
from potluck.report.growing import Median, Sum
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
from potluck.train.event_log import events_in
from potluck.train.gain import Gain

EVENTS_FILE = "events.jsonl"
NO_END = "still going or killed"
LEAST_TO_ADD = 0.02
"""If guests could add less than this part of the host's speed, the recovery would be noise."""


class MachineSummary(Struct, frozen=True, kw_only=True):
    """One machine's part in the run."""

    name: str
    role: str
    device: str
    samples: int
    share: float
    steps: int
    """Steps in which it computed at least one sample."""
    micro_batch: int | None
    """Most samples that it computed at once, the median over its steps."""
    rate: float | None
    """Samples per second while it computes, the median over its steps."""
    busy: float | None
    taken_back_samples: int
    dropped_samples: int
    times_lost: int


class Summary(Struct, frozen=True, kw_only=True):
    """A run's figures; None if the log does not contain them."""

    run_id: str
    recipe: str
    parameters: int | None
    steps: int
    planned_steps: int | None
    first_loss: float | None
    last_loss: float | None
    """The last loss; None if it was not finite."""
    not_applied: int
    """Steps whose gradient was not finite: their updates were not made."""
    ended: str
    """finished, interrupted, failed, or `NO_END`."""
    run_s: float
    """Seconds of the run, from its last line; for a resumed run, of all its parts."""
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
    """`foreseen_s` ÷ `predicted_s` − 1."""
    foreseen_s: float | None
    """Median seconds of the steps with a prediction. The others may have been faster or slower."""
    speedup: float | None
    """Speed-up over the host alone: the mean of the steps' speed-ups, weighted by their seconds."""
    speedup_margin: float | None
    """Half of the speed-up's 95 % interval, from its scatter over the run; None if there are too few steps."""
    efficiency: float | None
    """Samples per second ÷ the sum of what each machine reaches alone, without the time in which the host waited
    for its data."""
    recovery: float | None
    """(speed-up − 1) ÷ Σ(guest rate ÷ host rate): the share of the guests' possible gain. None if they could add
    less than a fiftieth of the host's speed, because the ratio would be noise."""
    could_add: float | None
    """Σ(guest rate ÷ host rate), the median over the steps."""
    wait_s: float
    data_s: float
    """Seconds that the host waited for samples before its steps could begin."""
    read_s: float
    """Seconds in which the host's loop read its own samples."""
    restart_s: float
    """The part of `data_s` in which worker processes were started again for a new epoch."""
    workers: int | None
    """Worker processes of the script's DataLoader; None without one."""
    update_s: float
    bytes_up: int
    bytes_down: int
    ahead_samples: int
    """Leased samples that had been sent before their lease."""
    unneeded_samples: int
    """Samples sent ahead that no lease of their guest used."""
    unneeded_bytes: int
    dropped_samples: int
    strangers_refused: int
    batch_layers: int
    """Layers that normalise over the batch (BatchNorm)."""
    effective_batch: float | None
    """With such layers: samples ÷ micro-batches of a step, the median: the number of samples that share their
    statistics."""
    machines: tuple[MachineSummary, ...]
    codecs: dict[str, str] = {}
    """With codec auto, each guest's last codec and why."""
    planned_s: float | None = None
    """Seconds per step predicted by a plan that was saved before the run."""


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
    by_step: dict[int, StepEnded] = {}
    for event in events:
        if isinstance(event, StepEnded):
            by_step[event.step] = event
        elif isinstance(event, RunStarted) and event.resumed_from is not None:
            by_step = {step: kept for step, kept in by_step.items() if step <= event.resumed_from}
    return [by_step[step] for step in sorted(by_step)]


def losses(events: Iterable[RunEvent]) -> tuple[list[int], list[float]]:
    """Steps and their losses, for the curve."""
    known = [(e.step, e.loss) for e in step_events(events) if e.loss is not None]
    return [step for step, _ in known], [loss for _, loss in known]


def summarize(events: Sequence[RunEvent]) -> Summary:
    totals, counted = Totals(), {id(step) for step in step_events(events)}
    for event in events:
        if isinstance(event, StepEnded) and id(event) not in counted:
            totals.pass_over(event)
        else:
            totals.fold(event)
    return totals.summary()


class Totals:
    """Collects a run's figures event by event; call `summary` at any time.

    Call `fold` with each event in order, but `pass_over` with a step that a resumed run repeats.
    """

    def __init__(self) -> None:
        self._start: RunStarted | None = None
        self._statistics: StatisticsMeasured | None = None
        self._ended = NO_END
        self._last: StepEnded | None = None
        self._count = 0
        self._before_s = self._begun_s = self._now_s = 0.0
        """Seconds of earlier processes, and the times of this one's first and last event, by its own clock."""
        self._over = True
        self._first_loss: float | None = None
        self._sums = Counter[str]()
        self._seconds, self._waited, self._updated = Sum(), Sum(), Sum()
        self._data, self._read, self._restarted = Sum(), Sum(), Sum()
        self._step_s, self._predicted_s, self._foreseen_s = Median(), Median(), Median()
        self._recovery, self._could_add, self._batch = Median(), Median(), Median()
        self._gain = Gain()
        self._done = self._possible = 0.0
        self._machines: dict[str, _MachineTotals] = {}
        self._codecs: dict[str, str] = {}
        self._taken_back, self._dropped, self._lost = Counter[str](), Counter[str](), Counter[str]()

    @property
    def steps(self) -> int:
        return self._last.step if self._last is not None else 0

    @property
    def run_s(self) -> float:
        """Seconds of the run until now; for a resumed run, of all its parts."""
        return self._before_s + self._now_s - self._begun_s

    def pass_over(self, event: RunEvent) -> None:
        """Only its time counts."""
        if not self._over:
            self._now_s = max(self._now_s, event.t_s)

    def fold(self, event: RunEvent) -> None:
        self.pass_over(event)
        match event:
            case StepEnded():
                self._step(event)
            case RunStarted():
                # A resumed run has several starts; an end before the last of them is not the end.
                self._start, self._ended = event, NO_END
                self._before_s += self._now_s - self._begun_s
                self._begun_s = self._now_s = event.t_s
                self._over = False
            case RunEnded():
                if not self._over:
                    self._now_s, self._over = self._begun_s + event.seconds, True
                self._ended = clean(event.reason) or "ended"
            case StatisticsMeasured():
                self._statistics = event
            case GuestCodec():
                self._codecs[clean(event.machine)] = f"{clean(event.codec)}, {clean(event.reason)}"
            case StrangerRefused():
                self._sums["strangers"] += 1
            case LeaseTakenBack():
                self._taken_back[event.machine] += event.samples
            case ContributionDropped():
                self._dropped[event.machine] += event.samples
            case GuestLost() | GuestLeft():
                self._taken_back[event.machine] += event.samples_taken_back
                self._lost[event.machine] += isinstance(event, GuestLost)

    def _step(self, step: StepEnded) -> None:
        self._last = step
        self._count += 1
        if self._first_loss is None:
            self._first_loss = step.loss
        self._sums["not_applied"] += not step.applied
        for name in ("bytes_up", "bytes_down", "dropped", "ahead", "unneeded", "unneeded_bytes"):
            self._sums[name] += getattr(step, name)
        self._seconds.add(step.step_s)
        self._waited.add(step.wait_s)
        self._updated.add(step.update_s)
        self._data.add(step.data_s)
        self._read.add(step.read_s)
        self._restarted.add(step.restart_s)
        self._step_s.add(step.step_s)
        if (predicted_s := _predicted_s(step)) is not None:
            self._predicted_s.add(predicted_s)
            self._foreseen_s.add(step.step_s)
        self._recovery.add(_recovery(step))
        self._could_add.add(_could_add(step))
        self._batch.add(_effective_batch(step))
        self._gain.add(step.speedup, step.step_s)
        if (at_best := _at_best(step)) is not None:
            self._done += at_best[0]
            self._possible += at_best[1]
        for machine in step.machines:
            self._machines.setdefault(machine.name, _MachineTotals()).add(machine)

    def summary(self) -> Summary:
        start, last, sums = self._start, self._last, self._sums
        seconds = self._seconds.value
        samples = sum(m.samples for m in self._machines.values())
        samples_per_s = samples / seconds if seconds else None
        tokens = start.tokens_per_sample if start is not None else None
        return Summary(
            run_id=clean(start.run_id) if start is not None else "",
            recipe=clean(start.recipe) if start is not None else "",
            parameters=start.parameters or None if start is not None else None,
            steps=self.steps,
            planned_steps=start.steps or None if start is not None else None,
            first_loss=self._first_loss,
            last_loss=last.loss if last is not None else None,
            not_applied=sums["not_applied"],
            ended=self._ended,
            run_s=self.run_s,
            seconds=seconds,
            samples=samples,
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
            mean_step_s=seconds / self._count if self._count else None,
            step_s=self._step_s.value,
            predicted_s=self._predicted_s.value,
            off=_off(self._foreseen_s.value, self._predicted_s.value),
            foreseen_s=self._foreseen_s.value,
            speedup=self._gain.value,
            speedup_margin=self._gain.margin,
            efficiency=self._done / self._possible if self._possible else None,
            recovery=self._recovery.value,
            could_add=self._could_add.value,
            wait_s=self._waited.value,
            data_s=self._data.value,
            read_s=self._read.value,
            restart_s=self._restarted.value,
            workers=start.workers if start is not None else None,
            update_s=self._updated.value,
            bytes_up=sums["bytes_up"],
            bytes_down=sums["bytes_down"],
            ahead_samples=sums["ahead"],
            unneeded_samples=sums["unneeded"],
            unneeded_bytes=sums["unneeded_bytes"],
            dropped_samples=sums["dropped"],
            strangers_refused=sums["strangers"],
            batch_layers=self._statistics.layers if self._statistics is not None else 0,
            effective_batch=self._batch.value if self._statistics is not None else None,
            machines=self._each(samples),
            codecs=dict(self._codecs),
        )

    def _each(self, total: int) -> tuple[MachineSummary, ...]:
        """The host first, then the guests by the samples they computed."""
        machines = []
        for name, own in self._machines.items():
            assert own.last is not None
            machines.append(
                MachineSummary(
                    name=clean(name),
                    role=own.last.role,
                    device=clean(own.last.device),
                    samples=own.samples,
                    share=own.samples / total if total else 0.0,
                    steps=own.steps,
                    micro_batch=_whole(own.micro_batch.value),
                    rate=own.rate.value,
                    busy=own.busy.value,
                    taken_back_samples=self._taken_back[name],
                    dropped_samples=self._dropped[name],
                    times_lost=self._lost[name],
                )
            )
        return tuple(sorted(machines, key=lambda m: (m.role != "host", -m.samples)))


class _MachineTotals:
    """One machine's steps."""

    def __init__(self) -> None:
        self.last: MachineFigures | None = None
        self.samples = self.steps = 0
        self.micro_batch, self.rate, self.busy = Median(), Median(), Median()

    def add(self, step: MachineFigures) -> None:
        self.last = step
        self.samples += step.samples
        if step.samples:
            self.steps += 1
            self.micro_batch.add(step.micro_batch)
            self.rate.add(step.rate)
            self.busy.add(step.busy)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _effective_batch(step: StepEnded) -> float | None:
    parts = sum(m.micro_batches for m in step.machines)
    return sum(m.samples for m in step.machines) / parts if parts else None


def _present(step: StepEnded) -> list[MachineFigures]:
    """The machines that could have helped in this step. Leaving out one that sat out would make the figures too
    good."""
    return [m for m in step.machines if m.samples or m.state in ("computing", "late", "sitting out")]


def _predicted_s(step: StepEnded) -> float | None:
    """The shares' time and the update after it."""
    return None if step.predicted_s is None else step.predicted_s + step.update_s


def _off(took_s: float | None, predicted_s: float | None) -> float | None:
    return took_s / predicted_s - 1 if took_s is not None and predicted_s else None


def _at_best(step: StepEnded) -> tuple[float, float] | None:
    """Actual and possible samples, in a step in which every machine's own rate was known."""
    rates = [m.rate for m in _present(step)]
    known = [rate for rate in rates if rate is not None]
    if not step.step_s or not known or len(known) != len(rates):
        return None
    return sum(m.samples for m in _present(step)), max(0.0, step.step_s - step.data_s) * sum(known)


def _could_add(step: StepEnded) -> float | None:
    """What the guests of a step could add, as a part of the host's speed."""
    rates = {"host": 0.0, "guest": 0.0}
    for machine in _present(step):
        rates[machine.role] += machine.rate or 0.0
    return rates["guest"] / rates["host"] if all(rates.values()) else None


def _recovery(step: StepEnded) -> float | None:
    more = _could_add(step)
    return (step.speedup - 1) / more if step.speedup is not None and more and more >= LEAST_TO_ADD else None
