"""The figures of a run: computes speed, shares and busy time from what was measured, and emits the run's events."""

from __future__ import annotations

import math
import platform
import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import torch

from potluck import codec as codecs
from potluck._version import __version__
from potluck.balance.quota import Estimate
from potluck.device.paced import LABEL
from potluck.hub.actions import StepResult
from potluck.hub.alone import AloneHub
from potluck.hub.host import HostHub
from potluck.hub.members import SITTING_OUT, Member
from potluck.hub.model_tensors import ModelTensors
from potluck.spec.events import MachineFigures, RunEnded, RunNote, RunStarted, StepEnded
from potluck.train.batch_statistics import BatchStatistics, StatisticsNotice
from potluck.train.context import ALONE, RunContext
from potluck.train.gain import RECENT_STEPS, AloneRate, Gain
from potluck.train.options import Options
from potluck.wire.token import is_this_machine

BEFORE_STEPS, FEWEST_BEFORE = 32, 4
"""The speed without guests is the median of at most this many steps, and is known after this few."""
LEAST_WAY_S = 0.005
"""A change that arrives faster came from a buffer, so that time says nothing about the link."""


@dataclass(slots=True)
class DataTimes:
    """The time that a step's samples cost the host's loop."""

    before_s: float = 0.0
    """Seconds until the step could begin: it waited for worker processes, or for a stream."""
    read_s: float = 0.0
    """Seconds in which it read its own samples."""
    restarted: bool = False
    """Whether worker processes were started again for a new epoch."""


def versions() -> dict[str, str]:
    return {"potluck": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


class RecentStep(NamedTuple):
    """One of the last steps."""

    step_s: float
    update_s: float
    samples: int
    by_guests: int
    """Samples that guests computed."""
    data_s: float
    """Seconds that the host waited for its samples."""


class Telemetry:
    """Collects one run's measurements and emits `run_start`, `step`, `batch_statistics` and `run_end`."""

    def __init__(
        self,
        context: RunContext,
        options: Options,
        hub: HostHub | AloneHub,
        statistics: BatchStatistics | None = None,
        *,
        total_steps: int | None = None,
        workers: int | None = None,
    ) -> None:
        """`total_steps`: total number of steps, if known. `workers`: number of the loader's workers."""
        self._workers = workers
        self._context, self._options, self._hub = context, options, hub
        self._total_steps = total_steps
        self._tells = context.role != ALONE or context.log.takes_steps
        """Whether the figures of steps are emitted, which takes a tenth of a millisecond a step."""
        self._statistics = StatisticsNotice(statistics, options.usual_batch)
        self._started = self._last_end = time.monotonic()
        self._first_step = 0
        self._host_busy_s = 0.0
        self._recent: deque[RecentStep] = deque(maxlen=RECENT_STEPS)
        self._samples = 0
        self._between_s = 0.0
        """Seconds that the script spent between steps, in total."""
        self._gain = Gain()
        self._alone = AloneRate()
        self._beside_s = Estimate(weight=0.1)
        """Seconds of a step that are neither computing, nor the update, nor waiting for data, of steps without any
        guest at work."""
        self._beside_guests_s = Estimate(weight=0.1)
        """The same for steps with guests, without the wait for them; used if there was no step before they
        joined."""
        self._before_s: deque[float] = deque(maxlen=BEFORE_STEPS)
        """Seconds a sample of the last steps without any guest at work."""
        self._here: dict[str, bool] = {}
        """The guests that have contributed: whether each runs on this machine."""
        self._steps_s = 0.0
        """Seconds of all steps so far."""
        self._not_applied = 0
        self._flops_per_sample: float | None = None
        self._change_bytes = 0.0
        """Payload of the weights' change in a step."""

    def started(self, step: int, tensors: ModelTensors) -> None:
        self._first_step = step
        self._started = self._last_end = time.monotonic()
        options, context = self._options, self._context
        self._change_bytes = codecs.get(context.down_codec).nbytes(tensors.layout.count)
        if options.tokens_per_sample:
            # A product and a sum for each weight: in the forward, for the input's gradient, and for a trained
            # weight's own. What attention adds is not counted.
            trained = tensors.layout.count
            frozen = sum(t.count for t in tensors.fingerprint if t.role == "frozen")
            self._flops_per_sample = options.tokens_per_sample * (6.0 * trained + 4.0 * frozen)
        self._context.log.emit(
            RunStarted(
                clock_s=context.log.started,
                run_id=context.folder.id if context.folder else "",
                folder=str(context.folder.path) if context.folder else "",
                recipe=context.what,
                machine=context.name,
                device=context.device.label,
                steps=self._total_steps,
                global_batch=options.usual_batch,
                parameters=sum(t.count for t in tensors.fingerprint if t.role != "buffer"),
                trained_parameters=tensors.layout.count,
                codec=context.config.codec,
                micro_batch=context.config.micro_batch or options.micro_batch,
                tokens_per_sample=options.tokens_per_sample,
                resumed_from=step or None,
                join=context.role != ALONE,
                epochs=options.epochs,
                workers=self._workers,
            )
        )

    def computed(self, samples: int, seconds: float) -> None:
        self._host_busy_s += seconds
        self._alone.add(samples, seconds)

    def step_ended(
        self,
        step: int,
        loss: float,
        result: StepResult,
        update_s: float,
        now: float,
        *,
        applied: bool,
        outside: tuple[float, float],
        data: DataTimes | None = None,
    ) -> None:
        """`now`: when the device finished the update, by the monotonic clock; it may have continued since.

        `applied`: whether the update was made. `outside`: from when to when the script did something else before
        this step, such as a validation; that time does not count as the step's.
        """
        self._not_applied += not applied
        between_s = max(0.0, outside[1] - max(outside[0], self._last_end))
        step_s, self._last_end = now - self._last_end - between_s, now
        count = sum(result.samples.values())
        self._samples += count
        data = data or DataTimes()
        # What passed while the device computed was not lost.
        idle_s = max(0.0, step_s - self._host_busy_s - update_s - result.wait_s)
        data.before_s = min(data.before_s, idle_s)
        rest_s = idle_s - data.before_s
        own = result.samples.get(self._context.name, 0)
        self._recent.append(RecentStep(step_s, update_s, count, count - own, data.before_s))
        self._between_s += between_s
        self._steps_s += step_s
        members = self._hub.members()
        if not members or (own == count and all(m.state == SITTING_OUT for m in members)):
            self._beside_s.add(rest_s)
            self._before_s.append(step_s / max(1, count))
        else:
            self._beside_guests_s.add(rest_s)
        if self._tells:
            self._tell(step, loss, result, (step_s, between_s, update_s), data, applied=applied)
        here = [m.id for m in self._hub.members() if self._here.get(m.name)] if self._here else ()
        self._hub.timed(step - 1, count, step_s, here)
        self._host_busy_s = 0.0
        self._alone.step_ended()
        news = self._statistics.after_step(step, result.micro_batches)
        if news is not None:
            self._context.log.emit(news)

    def _tell(
        self,
        step: int,
        loss: float,
        result: StepResult,
        times: tuple[float, float, float],
        data: DataTimes,
        *,
        applied: bool,
    ) -> None:
        """Emit a step's figures. `times` are the seconds of the step, of the script before it, and of its
        update."""
        step_s, between_s, update_s = times
        options = self._options
        mean_s = fmean(each.step_s for each in self._recent)
        rate = fmean(each.samples for each in self._recent) / mean_s
        sample_s = self._alone_sample_s()
        speedup = self._times_alone(mean_s, sample_s)
        self._gain.add(speedup, step_s)
        up, down = self._hub.traffic()
        self._context.log.emit(
            StepEnded(
                step=step,
                steps=self._total_steps,
                loss=_finite(loss),
                applied=applied,
                step_s=round(step_s, 5),
                between_s=round(between_s, 5),
                samples=result.samples,
                samples_per_s=rate,
                tokens_per_s=rate * options.tokens_per_sample if options.tokens_per_sample else None,
                mfu=self._mfu(result, step_s),
                speedup=speedup,
                predicted_s=None if result.predicted_s is None else result.predicted_s + data.before_s,
                eta_s=self._eta_s(step, mean_s),
                wait_s=round(result.wait_s, 5),
                update_s=round(update_s, 5),
                bytes_up=up,
                bytes_down=down,
                dropped=result.dropped_samples,
                taken_back=result.taken_back_samples,
                machines=self._machines(result, step_s, sample_s),
                data_s=round(data.before_s, 5),
                read_s=round(data.read_s, 5),
                restart_s=round(data.before_s, 5) if data.restarted else 0.0,
                ahead=result.ahead_samples,
                unneeded=result.unneeded_samples,
                unneeded_bytes=result.unneeded_bytes,
            )
        )

    def _eta_s(self, step: int, mean_s: float) -> float | None:
        """The steps left at the pace of the last ones, plus the script's mean time between steps."""
        if not self._total_steps:
            return None
        return (mean_s + self._between_s / max(1, step - self._first_step)) * max(0, self._total_steps - step)

    def ended(self, step: int, loss: float | None, reason: str) -> None:
        seconds, folder = time.monotonic() - self._started, self._context.folder
        if reason == "failed" and folder is not None and not folder.has_anything():
            folder = None  # it is removed
        self._context.log.emit(
            RunEnded(
                step=step,
                loss=msgspec.UNSET if loss is None else _finite(loss),
                not_applied=self._not_applied,
                seconds=seconds,
                samples_per_s=self._samples / max(self._steps_s, 1e-9),
                speedup=self._gain.value,
                reason=reason,
                folder=str(folder.path) if folder else "",
            )
        )

    def _mfu(self, result: StepResult, step_s: float) -> float | None:
        """Share of this machine's peak FLOP/s that its own samples used; None if the peak is not known."""
        peak = self._context.device.peak_flops
        if peak is None or self._flops_per_sample is None or step_s <= 0:
            return None
        return result.samples.get(self._context.name, 0) * self._flops_per_sample / step_s / peak

    def _times_alone(self, mean_s: float, sample_s: float | None) -> float | None:
        """Speed-up over this machine alone, from its measured rate and its overhead per step.

        In a step of 1.5 ms the overhead is a third: without it, a guest that cost nothing seemed to slow the host
        down. If guests were there from the first step on, the overhead is that of steps with guests. Alone, the
        host would also wait for its data: worker processes read while it computes, so a step takes the longer of
        the two. A step without contributions counts as this machine alone.
        """
        # Before a guest has contributed, the figure would only show noise in this machine's own speed.
        helping = [m for m in self._hub.members() if m.samples]
        if self._context.role == ALONE or not sample_s or not helping:
            return None
        if not any(each.by_guests for each in self._recent):
            return 1.0
        update_s, samples, data_s = (
            fmean(getattr(each, name) for each in self._recent) for name in ("update_s", "samples", "data_s")
        )
        beside_s = self._beside_s.value if self._beside_s.value is not None else self._beside_guests_s.value
        alone_s = samples * sample_s + update_s + (beside_s or 0.0)
        alone_s = max(alone_s, min(mean_s, alone_s + data_s)) if self._workers else alone_s + data_s
        if self._any_here(helping) and len(self._before_s) >= FEWEST_BEFORE:
            # Its processes take this machine's time: what is measured beside them is not the speed alone.
            alone_s = min(alone_s, samples * median(self._before_s))
        return alone_s / mean_s

    def _any_here(self, helping: list[Member]) -> bool:
        """Whether a guest computes on this machine; the first such guest is reported."""
        for member in helping:
            if member.name not in self._here:
                told = any(self._here.values())
                emulated = member.device.startswith(LABEL)  # another machine, whose own time is its own
                self._here[member.name] = is_this_machine(member.address) and not emulated
                if self._here[member.name] and not told:
                    text = f"{member.name} runs on this same machine: the two share its processor"
                    self._context.log.emit(RunNote(text=text))
        return any(self._here[member.name] for member in helping)

    def _alone_sample_s(self) -> float | None:
        return self._alone.sample_s or self._hub.host_sample_s()

    def _machines(self, result: StepResult, step_s: float, sample_s: float | None) -> tuple[MachineFigures, ...]:
        micro_batch, micro_batches = _micro_batches(self._context.name, result)
        host = MachineFigures(
            name=self._context.name,
            role="host",
            device=self._context.device.label,
            samples=result.samples.get(self._context.name, 0),
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            rate=1 / sample_s if sample_s else None,
            busy=min(1.0, self._host_busy_s / step_s) if step_s else None,
            state="computing",
            reason="",
        )
        return (host, *(_guest(m, result, step_s, self._change_bytes) for m in self._hub.members()))


def _guest(member: Member, result: StepResult, step_s: float, change_bytes: float) -> MachineFigures:
    samples = result.samples.get(member.name, 0)
    micro_batch, micro_batches = _micro_batches(member.name, result)
    return MachineFigures(
        name=member.name,
        role="guest",
        device=member.device,
        samples=samples,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        rate=member.rate.value,
        busy=min(1.0, member.busy_s / step_s) if samples and step_s else 0.0,
        state=member.state,
        reason=member.reason,
        receive_s=round(member.receive_s, 4) if samples and member.receive_s > 0 else None,
        send_s=_rounded(member.tail.value) if samples else None,
        answered_s=round(member.answered_s, 4) if samples else None,
        link_bytes_per_s=_link(change_bytes, member.transfer.value),
    )


def _micro_batches(machine: str, result: StepResult) -> tuple[int | None, int]:
    """Most samples that it computed at once in the step, and the number of its micro-batches."""
    sizes = result.micro_batches.get(machine, ())
    return max(sizes, default=None), len(sizes)


def _link(change_bytes: float, way_s: float | None) -> float | None:
    return round(change_bytes / way_s) if way_s is not None and way_s >= LEAST_WAY_S else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
