"""The training loop on a guest: computes leases in the user's loop body and sends contributions.

Decides when a lease is cut short and when the gradient is sent. It steps no optimizer: the host owns the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from potluck.errors import LoopError
from potluck.hub.guest import GuestHub, RunOver
from potluck.hub.guest_work import Work
from potluck.hub.model_tensors import ModelTensors
from potluck.hub.overlap import Overlap
from potluck.hub.parity import sketch
from potluck.spec.events import Delivered, GuestEnded, RunNote
from potluck.train.context import RunContext
from potluck.train.data import Loader, cloned, to_device
from potluck.train.ending import Ending, GuestDone
from potluck.train.microbatch import MicroBatch
from potluck.train.options import Options
from potluck.train.randomness import RandomState, digests, seed
from potluck.train.step import SavedBytes, Step, StepRules


@dataclass(slots=True, kw_only=True)
class GuestParts:
    """What a guest computes with."""

    context: RunContext
    options: Options
    model: nn.Module
    tensors: ModelTensors
    hub: GuestHub
    loader: Loader | None
    """Only if the data set is local."""
    micro: MicroBatch


class GuestTrainer:
    """Serves one host until the run is over."""

    def __init__(self, parts: GuestParts) -> None:
        self._p = parts
        self._hub, self._device = parts.hub, parts.context.device
        self._device.attach(parts.model)
        self._overlap = Overlap(parts.model, parts.tensors.trained, parts.tensors.layout)
        self._work: Work | None = None
        self._compute_s = 0.0
        self._last_s = 0.0
        self._sample_s = 0.0
        self._saved_bytes: SavedBytes | None = None
        self._samples = 0
        self._seconds = 0.0
        self._ending = Ending(self._end)
        parts.context.loop.ends_by(self._ending)

    def steps(self) -> Iterator[Step]:
        log = self._p.context.log
        self._hub.note = lambda text: log.emit(RunNote(text=text))
        self._hub.open(lambda: (self._p.micro.size(), self._p.micro.most()))
        rules = StepRules(
            batches=self._batches,
            after_backward=self._after_backward,
            loss_is=self._p.options.loss_is,
            trained=self._p.tensors.trained,
            sends=True,
        )
        step: Step | None = None
        try:
            while True:
                self._work = self._hub.next_work()
                step = Step(self._work.step, rules, epoch=self._work.epoch)
                yield step
                if not step.finished:
                    raise LoopError(
                        f"step {step.number} was left before all its samples were computed",
                        hint="let `for batch in step` run to its end",
                    )
        except RunOver as over:
            self._ending.now("")
            raise GuestDone(str(over)) from None
        finally:
            between = step is None or step.finished
            self._overlap.remove()
            # Without a reason from the host, its script does something else now.
            self._ending.soon("its script left the loop" if between else "its script left the loop in a step")

    def _end(self, reason: str) -> None:
        """Say goodbye, if there is a reason to."""
        self._overlap.remove()
        if self._p.loader is not None:
            self._p.loader.close()
        self._hub.close(reason, failed=bool(self._p.context.loop.failure))
        dropped = self._hub.dropped_samples
        ended = GuestEnded(samples=self._samples - dropped, compute_s=round(self._seconds, 3), dropped=dropped)
        self._p.context.log.emit(ended)

    def _batches(self, step: Step) -> Iterator[Any]:
        work = self._work
        assert work is not None
        self._compute_s = 0.0
        self._device.at_step(work.step + 1)
        self._zero_gradients()
        self._hub.enter(work)
        try:
            yield from self._check(step, work) if work.check else self._lease(step, work)
        except RunOver as over:
            # This is raised into the user's loop, where `steps` does not see it.
            self._end("")
            raise GuestDone(str(over)) from None
        finally:
            self._overlap.idle()
            self._hub.let_go(work)
            self._zero_gradients()
            self._hub.leave()

    # -- a lease ----------------------------------------------------------------------------------------

    def _lease(self, step: Step, work: Work) -> Iterator[Any]:
        if work.samples is not None and self._p.loader is not None:
            self._p.loader.expect(work.samples)
        done = 0
        for number, size in enumerate(work.sizes):
            batch = self._fetch(work, number)
            if batch is None:
                break
            following = work.sizes[number + 1] if number + 1 < len(work.sizes) else 0
            last = not following or self._too_late_for(work, done, size, following)
            if last:
                self._hub.closing(work, done + size, last_takes_s(work, size * self._sample_s, gated=number == 0))
            yield from self._compute(step, work, batch, size, last=last)
            done += size
            if work.over:
                break
            if last:
                self._deliver(step, work, done)
                return
        self._hub.stopped(work, done, self._compute_s)

    def _deliver(self, step: Step, work: Work, count: int) -> None:
        loss_sum = step.loss_sum()
        step.loss = loss = step.mean_loss(count)
        items, compute_s = step.items(), self._compute_s
        if not self._hub.finish(work, count=count, loss_sum=loss_sum, items=items, compute_s=compute_s):
            return
        self._samples += count
        self._seconds += self._compute_s
        self._p.context.log.emit(
            Delivered(
                step=work.step + 1,
                samples=count,
                loss=loss if math.isfinite(loss) else None,
                compute_s=round(self._compute_s, 4),
                total_samples=self._samples - self._hub.dropped_samples,
            )
        )

    def _compute(self, step: Step, work: Work, batch: Any, size: int, *, last: bool) -> Iterator[Any]:
        """Give the user's loop one micro-batch, whose forward waits for weights that still arrive."""
        hub, device = self._hub, self._device
        hub.wait_for_pieces(work, self._overlap.up_front)
        self._overlap.computing(
            wait=lambda pieces: device.waited(hub.wait_for_pieces(work, pieces)),
            ready=(lambda pieces: hub.code(work, pieces)) if last else None,
        )
        step.hand_out(size)
        if self._p.micro.searching:
            self._saved_bytes = SavedBytes()
            self._saved_bytes.start()
        device.begin(size)
        yield batch
        step.check_done()
        self._overlap.idle()

    def _after_backward(self, samples: int) -> None:
        self._last_s = self._device.end()
        self._compute_s += self._last_s
        self._sample_s = self._last_s / samples
        saved = self._saved_bytes.stop() if self._saved_bytes is not None else 0
        self._saved_bytes = None
        self._p.micro.record(samples, self._last_s, saved)

    def _too_late_for(self, work: Work, done: int, size: int, following: int) -> bool:
        """Whether waiting for the next micro-batch would cost the host more than computing it itself."""
        if not self._sample_s:
            return False
        elapsed = time.monotonic() - work.received
        delivered_s = elapsed + size * self._sample_s + last_takes_s(work, following * self._sample_s)
        host_done_s = work.within_s + (work.quota - done - size) * work.host_sample_s
        return delivered_s > host_done_s

    def _fetch(self, work: Work, number: int) -> Any | None:
        if work.samples is not None:
            assert self._p.loader is not None
            batch = None if work.over else self._p.loader.fetch(work.samples[number])
        else:
            batch = self._hub.batch(work, number)
        return None if batch is None else to_device(batch, self._device)

    # -- a check ----------------------------------------------------------------------------------------

    def _check(self, step: Step, work: Work) -> Iterator[Any]:
        """Compute the common batch twice: once for the gradient to be compared, once to measure the time."""
        size = work.sizes[0]
        batch = self._fetch(work, 0)
        if batch is not None:
            self._hub.wait_for_all(work)
        if batch is None or work.over:
            self._hub.stopped(work, 0, 0.0)  # the host went on before its weights were here: another time
            return
        self._overlap.watch()
        own = RandomState(self._device)
        try:
            if work.seed is not None:
                seed(self._device, work.seed)
            yield from self._compute(step, work, cloned(batch), size, last=False)
            random = digests(self._device)
        finally:
            own.restore()
        self._overlap.conclude(self._p.model)
        trained = self._p.tensors.trained
        loss, items = step.mean_loss(size), step.items()
        result = sketch([p.grad for p in trained], [p.numel() for p in trained], loss)
        self._zero_gradients()
        yield from self._compute(step, work, batch, size, last=False)
        if not work.over:
            values = memoryview(result.values.view("u1"))  # type: ignore[arg-type]
            bf16 = self._overlap.bf16
            self._hub.send_sketch(
                work, values=values, loss=loss, items=items, compute_s=self._last_s, random=random, bf16=bf16
            )

    def _zero_gradients(self) -> None:
        for parameter in self._p.tensors.trained:
            parameter.grad = None


def last_takes_s(work: Work, compute_s: float, *, gated: bool = False) -> float:
    """Seconds from the start of the last micro-batch to the contribution's arrival at the host.

    Its backward takes at least as long as sending the gradient. If it is also the first one (`gated`), its forward
    takes at least as long as receiving the weights.
    """
    forward_s, backward_s = compute_s / 3, 2 * compute_s / 3
    if gated:
        forward_s = max(forward_s, work.transfer_s)
    return forward_s + max(backward_s, work.transfer_s) + work.tail_s
