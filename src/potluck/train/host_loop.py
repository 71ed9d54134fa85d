"""The training loop on the host or alone: micro-batches, the update, checkpoints, and the step's figures.

Owns the optimizer's step. The loop is the same alone and with guests: only the hub knows about guests.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import DataError, LoopError, NonFiniteError, RunFolderError
from potluck.hub.actions import CommonBatch, StepResult
from potluck.hub.alone import AloneHub
from potluck.hub.host import HostHub
from potluck.hub.parity import Reference, Sketch, sketch
from potluck.spec.events import RunNote
from potluck.train import given
from potluck.train.bad_steps import BadSteps, StepFacts, how_to_go_on
from potluck.train.beginning import Beginning, BufferPlaces, Buffers
from potluck.train.changed_buffers import ChangedBuffers
from potluck.train.context import Waiting
from potluck.train.data import cloned, to_device
from potluck.train.ending import Ending
from potluck.train.flight import Flight
from potluck.train.host_ranks import RoundMark, shares
from potluck.train.parts import Parts
from potluck.train.randomness import RandomState, digests, seed
from potluck.train.saving import Saving
from potluck.train.scheduling import Scheduling
from potluck.train.step import TOTALS, SavedBytes, Step, StepRules, mean_of
from potluck.train.telemetry import DataTimes, Telemetry
from potluck.train.update import Collected, Divisor, Update, later, own_norm, prepare_gradients
from potluck.train.update_hooks import UpdateHooks

TURN_S = 0.0002
"""How long other Python threads may delay the thread that feeds a device which queues its work. With Python's
default of 5 ms a GPU ran out of work while contributions arrived: an H200 with 8 guests lost 33 % of its speed,
with this value 25 %."""


class HostTrainer:
    """Runs the steps of one training on the host."""

    def __init__(self, parts: Parts, hub: HostHub | AloneHub) -> None:
        self._p, self._hub = parts, hub
        self._device = parts.context.device
        self._turn_s = sys.getswitchinterval()
        if self._device.ahead:
            sys.setswitchinterval(TURN_S)
        self._trained = parts.tensors.trained
        self._rules = StepRules(
            batches=self._batches,
            after_backward=self._after_backward,
            loss_is=parts.options.loss_is,
            trained=self._trained,
        )
        self._frozen = {n: t for n, t in parts.tensors.fixed.items() if isinstance(t, nn.Parameter)}
        self._held = given.held(parts.optimizer)
        folder = parts.context.folder
        self._saves = Saving(parts, folder.checkpoints) if folder and not parts.options.by_trainer else None
        total = parts.loader.total_steps(parts.options.steps)
        self._telemetry = Telemetry(
            parts.context, parts.options, hub, parts.statistics, total_steps=total, workers=parts.loader.workers
        )
        self._data = DataTimes()
        self._saved_bytes: SavedBytes | None = None
        self._ranks = ranks = parts.context.ranks
        self._width = 1 if ranks is None else ranks.world
        mark = None if ranks is None else lambda: RoundMark(self._device.mark(), ranks)
        self._flight = Flight(self._device, self._computed, mark)
        self._measuring = True
        """Whether the current micro-batch is timed alone, not as one of several in flight."""
        self._scheduling = Scheduling(parts.options.scheduler, parts.optimizer)
        self._step_update = Update(
            parts.optimizer, queues=bool(self._device.ahead) and not parts.options.by_trainer
        )
        self._bad = BadSteps(parts.context.name, most=parts.context.config.max_bad_steps)
        self._buffer_places = BufferPlaces(parts.model)
        self._buffers: Buffers | None = None
        self._changed = ChangedBuffers(parts.model, hub.buffers_changed)
        self._own_samples = 0  # what this process has computed of the step
        self._own_share = 1.0  # and which part of it that was
        self._beginning: Beginning | None = None
        self._waiting = Waiting(parts.context.loop, None if parts.options.by_trainer else self._stop_if_asked)
        self._checkpoint_due = False
        self._comparing = False
        self._divisor = Divisor()
        self._alike = contextlib.ExitStack()
        """Open while a common batch is computed: what this thread must restore and release afterwards."""
        self._trains = parts.model.training and not parts.options.by_trainer
        """Whether the script alone put the model into training mode."""
        self._loss: float | None = None
        self._first = self._done = parts.ledger.step
        """The last finished step. During an update the ledger has already closed a step that may still fail."""
        self._returned = time.monotonic()  # when the script was given the last step back
        self._outside = self._returned, self._returned
        self._interrupted = self._abandoned = False
        self._last_save_failed: RunFolderError | NonFiniteError | None = None
        """The failure to save at the end of a loop that was left."""
        self._ending = Ending(self._end)
        self._hooks = UpdateHooks(
            parts.optimizer, hub.updating, over=lambda: self._ending.over, by_trainer=parts.options.by_trainer
        )
        parts.context.loop.steps_done = lambda: parts.ledger.step
        parts.context.loop.ends_by(self._ending)

    # -- the run ----------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield one Step after the other until the run is over. In any case the guests are told of the end."""
        loop = self._steps()
        if self._p.context.folder is None:  # one with a folder is closed by its session
            self._ending.close_at_exit(loop)
        return loop

    def _steps(self) -> Generator[Step, None, None]:
        reason = "failed"
        step: Step | None = None
        self._telemetry.started(self._p.ledger.step, self._p.tensors)
        try:
            while (step := self._next_step()) is not None:
                yield step
                if not step.finished:
                    raise LoopError(
                        f"step {step.number} was left before all its samples were computed",
                        hint="let `for batch in step` run to its end; break out of the outer loop instead",
                    )
            self._flight.finish()
            self._stop_if_bad()
            reason = "finished"
        except GeneratorExit:
            # The user's loop was left: by break after a step, or by an exception, which cannot be told apart here.
            if step is None or step.finished:
                reason = ""
                self._left()
            raise
        finally:
            if reason:
                self._ending.now(reason)

    def _next_step(self) -> Step | None:
        """None if there is nothing left to do."""
        if self._hooks.waiting:
            raise LoopError(
                f"the trainer did not step its optimizer after step {self._p.ledger.step}",
                hint="update the weights once a step, with the optimizer that the trainer was given",
            )
        options, ledger, loader = self._p.options, self._p.ledger, self._p.loader
        before = time.monotonic()
        self._cut()
        samples = None
        if not (enough := options.steps is not None and ledger.step >= options.steps):
            if self._saves is not None and loader.waits:
                self._beginning, self._saves.place = Beginning(self._device), loader.state(ledger.step)
            try:
                with self._waiting if loader.waits else contextlib.nullcontext():
                    samples = ledger.prepare()
            except DataError:
                if self._ranks is None:  # what was trained before is saved as when the run is stopped
                    self._abandon()
                raise
            if self._saves is not None:
                self._saves.place = None
        self._data.before_s = waited_s = time.monotonic() - before
        self._returned += waited_s  # a stream may have to be waited for: not the script's time
        if samples is None:
            if ledger.step == self._first:
                limit = f"steps is {options.steps}" if enough else f"epochs is {options.epochs}"
                self._p.context.log.emit(RunNote(text=f"nothing left to do: {ledger.step} steps are done, {limit}"))
            return None
        # A batch sampler may give larger batches than any so far.
        self._p.micro.limit = max(self._p.micro.limit, -(-samples.count // self._width))
        whole = samples.count if isinstance(self._hub, AloneHub) and self._ranks is None else None
        return Step(ledger.step, self._rules, epoch=samples.epoch, ends_epoch=self._ends_epoch, whole=whole)

    def _ends_epoch(self) -> bool:
        before = time.monotonic()
        try:
            return self._p.loader.ends_epoch()
        finally:
            self._returned += time.monotonic() - before  # it may have read a batch: not the script's time

    def _left(self) -> None:
        """Save the last complete step now: what the script does next with the weights is not part of the run."""
        if self._ending.over:
            return
        self._flight.finish()
        if self._saves is not None:
            try:
                with self._saving():
                    self._saves.finish()
            except (RunFolderError, NonFiniteError) as error:
                self._last_save_failed = error  # here it would be lost: nobody hears what a generator's end raises
        self._ending.soon("finished")

    def _end(self, reason: str) -> None:
        """Save, end the guests and write the log's last line."""
        self._alike.close()  # after a failure in a common batch a reader may still wait
        if self._interrupted or (self._p.options.by_trainer and self._p.context.loop.stop_requested()):
            reason = "interrupted"
        try:
            try:
                self._tell_last_step(failed=reason == "failed")
            except BaseException:
                reason = "failed"
                raise
            finally:
                if self._ranks is not None:
                    self._ranks.end()
                with self._saving():
                    self._save_last(reason)
        except BaseException:
            reason = "failed"
            raise
        finally:
            with contextlib.closing(self._p.loader):  # last: workers that hang are waited for
                self._hooks.close()
                sys.setswitchinterval(self._turn_s)
                self._hub.close(reason)
                self._telemetry.ended(self._done, self._loss, reason)

    def _save_last(self, reason: str) -> None:
        """Save at the end of the run. An earlier save that failed could be repeated; this one cannot."""
        if self._saves is None:
            return
        if self._last_save_failed is not None:
            raise self._last_save_failed
        if reason == "failed" and not self._abandoned:
            self._saves.writer.settle()
        else:
            self._saves.finish()

    def _tell_last_step(self, *, failed: bool) -> None:
        """The update may be unfinished. After a failure, the device or other ranks may never answer."""
        if not failed:
            self._flight.finish()
        elif self._ranks is None:
            with contextlib.suppress(RuntimeError):
                self._flight.finish()

    # -- one step ---------------------------------------------------------------------------------------

    def _batches(self, step: Step) -> Iterator[Any]:
        """This machine's micro-batches of the step; then the update."""
        self._outside = self._returned, time.monotonic()
        if self._checkpoint_due and self._saves is not None:
            # Not at the end of the last step: between steps the user's code may have other weights in the model.
            # One that is still being written puts this one off to the next step.
            self._flight.finish()  # the log tells of a step before there is a checkpoint of it
            # After a step that was not applied nobody knows whether the weights are any good.
            with self._saving():
                self._checkpoint_due = self._bad.in_a_row > 0 or not self._saves.begin()
        self._buffers, self._own_samples = Buffers(self._buffer_places), 0
        if self._saves is not None:
            self._beginning = Beginning(self._device, self._buffers)
        try:
            yield from self._share(step)
        except DataError:
            if self._ranks is None:  # what was trained before is saved as when the run is stopped
                self._abandon()
            raise
        self._own_share = self._own_samples / self._p.ledger.global_batch
        self._update(step)
        self._returned = time.monotonic()

    def _cut(self) -> None:
        """Tell worker processes what this machine will compute at once of the steps that they read from now on."""
        micro, loader, alone = self._p.micro, self._p.loader, isinstance(self._hub, AloneHub)
        size = 0 if micro.searching else micro.size()
        micro.lag = loader.cut_ahead * -(-micro.limit // size) if size else 0
        least, share = self._p.least.micro_batch, 1.0 if alone else self._own_share
        loader.cut(size, least=least, share=share, anyhow=not alone)

    def _made(self) -> int:
        """How many samples at the front of the pool a worker process has collated together."""
        return self._p.loader.made_at(self._p.ledger.front)

    def _share(self, step: Step) -> Iterator[Any]:
        """This machine's part of the step."""
        before, loader = time.monotonic(), self._p.loader
        with self._waiting:
            loader.ready()
        self._data.before_s += time.monotonic() - before
        self._data.restarted = loader.restarted
        self._device.at_step(step.index + 1)
        if self._ranks is not None:
            self._ranks.begin_step(step.index, step.epoch or 0, ends_epoch=step.ends_epoch)
        self._hub.begin_step(self._head_start_s())
        for parameter in self._trained:
            parameter.grad = None
        while True:
            self._stop_if_asked()
            self._stop_if_bad()
            positions, common = self._hub.take(self._p.micro.size() * self._width, self._busy, self._made)
            if not positions:
                break
            began = time.monotonic()
            own = positions if self._ranks is None else self._dealt(positions, common is not None)
            self._own_samples += len(own)
            if common is None:
                batch = to_device(self._fetch(own), self._device)
                yield from self._hand_out(step, batch, len(own))
            else:
                began = yield from self._common(step, own, common)
            self._hub.launched(positions, self._sizes(positions, common is not None))
            self._flight.launched(len(positions), began)
            if self._measuring:
                self._finish()

    def _fetch(self, positions: tuple[int, ...]) -> Any:
        before = time.monotonic()
        with self._waiting:  # a data set may hang
            batch = self._p.loader.fetch(positions)
        self._data.read_s += time.monotonic() - before
        return batch

    def _head_start_s(self) -> float:
        """Extra time of the guests beyond this machine's own samples: see `Stepping.begin`.

        A device that still has work when the last contribution arrives starts the next step without a pause.
        """
        if not self._device.ahead or self._ranks is not None:
            return 0.0
        return self._flight.ahead_of_s(self._p.micro.size(), self._hub.host_sample_s() or 0.0)

    def _busy(self) -> bool:
        """Whether this machine's own device has unfinished work."""
        if self._ranks is None or not self._flight.busy:
            return self._flight.busy
        self._finish()
        return False

    def _dealt(self, positions: tuple[int, ...], check: bool) -> tuple[int, ...]:
        """Give the other ranks their parts of a round, and return this rank's. This rank computes a common batch
        alone."""
        assert self._ranks is not None
        if not check:
            return self._ranks.deal(positions, self._hub.samples_of, self._p.least.micro_batch)
        self._ranks.deal_nothing()
        return positions

    def _sizes(self, positions: tuple[int, ...], check: bool) -> list[int]:
        """How many of these samples each rank computes, if any."""
        if self._ranks is None or check:
            return [len(positions)]
        return [len(part) for part in shares(positions, self._width, self._p.least.micro_batch) if part]

    def _finish(self) -> None:
        """Wait for everything that is being computed."""
        if self._ranks is not None and self._device.ahead:
            self._ranks.land()
        self._flight.finish()

    def _begin(self, samples: int) -> None:
        """Begin a micro-batch. While sizes are tried, none is queued behind another."""
        self._measuring = self._p.micro.searching or not self._device.ahead
        if not self._measuring:
            return
        if self._p.micro.searching:
            self._saved_bytes = SavedBytes()
            self._saved_bytes.start()
        self._device.begin(samples)

    def _computed(self, samples: int, seconds: float) -> None:
        self._hub.computed(samples, seconds)
        self._telemetry.computed(samples, seconds)

    def _after_backward(self, samples: int) -> None:
        if not self._measuring:
            return
        seconds = self._device.end()
        saved = self._saved_bytes.stop() if self._saved_bytes is not None else 0
        self._saved_bytes = None
        self._p.micro.record(samples, seconds, saved)

    def _hand_out(self, step: Step, batch: Any, samples: int) -> Iterator[Any]:
        """Give the user's loop one micro-batch."""
        step.hand_out(samples)
        self._begin(samples)
        rates = self._scheduling.rates()
        self._changed.before(step.index - self._first)
        yield batch
        step.check_done()
        self._changed.after()
        if not self._p.options.by_trainer:
            self._scheduling.check(rates, step.number)

    # -- a parity check ---------------------------------------------------------------------------------

    def _common(self, step: Step, positions: tuple[int, ...], common: CommonBatch) -> Generator[Any, None, float]:
        """Compute a micro-batch on which guests are checked, usually the step's first. Returns when it began.

        Its random numbers are those that the guests will draw; this machine's generators then continue as before.
        While it runs, no other thread reads samples, because reading may draw random numbers.
        """
        assert not isinstance(self._hub, AloneHub)
        before = digests(self._device)
        batch = self._fetch(positions)
        reading_draws = digests(self._device) != before
        packed = self._hub.pack_common(batch)  # before the loop's body, which may change the batch in place
        if self._p.options.data == "local" and not packed.why_not:
            own = RandomState(self._device)
            again = self._hub.pack_common(self._p.loader.fetch_again(positions))
            own.restore()
            packed = replace(packed, same_again=again == packed)
        second, coded = None, True
        with step.set_aside(), self._alike:
            if reading_draws:
                self._alike.enter_context(self._p.loader.nobody_reads())
            if common.twice is not None:
                second, coded = yield from self._uncounted(step, cloned(batch), len(positions), common)
            began = time.monotonic()
            self._alike.callback(RandomState(self._device).restore)
            seed(self._device, common.seed)
            yield from self._hand_out(step, to_device(batch, self._device), len(positions))
            random = digests(self._device)
            reference = Reference(
                first=self._sketch(step, len(positions)),
                items=step.items(),
                random=random,
                second=second,
                uncoded=not coded,
                reseeded=common.twice or frozenset(),
            )
        self._hub.check_computed(positions, reference, packed)
        return began

    def _uncounted(
        self, step: Step, batch: Any, samples: int, common: CommonBatch
    ) -> Generator[Any, None, tuple[Sketch | None, bool]]:
        """Compute the common batch at the weights that guests hold, with other random numbers for the generators
        that differed. It leaves no trace.

        The second result tells whether these weights are known yet. If not, it is computed at the host's own, where
        random numbers alone can make a difference.
        """
        assert not isinstance(self._hub, AloneHub)
        self._finish()
        beginning = Beginning(self._device, Buffers(self._buffer_places))
        seed(self._device, common.seed, otherwise=common.twice or frozenset())
        made = None
        with self._hub.replica_in_place() as held:
            if held or common.twice:
                yield from self._hand_out(step, to_device(batch, self._device), samples)
                made = self._sketch(step, samples)
        for parameter in self._trained:
            parameter.grad = None
        step.reset_loss()
        beginning.undo()
        return made, held

    def _sketch(self, step: Step, samples: int) -> Sketch:
        """Report a common batch: everything summed so far is its gradient and its loss."""
        gradients, sizes = [p.grad for p in self._trained], [p.numel() for p in self._trained]
        return sketch(gradients, sizes, step.mean_loss(samples))

    # -- the update -------------------------------------------------------------------------------------

    def _update(self, step: Step) -> None:
        """Queue the weights' update on the device. Its result is reported when it is finished."""
        if self._trains and not self._p.model.training:
            self._trains = False
            text = f"step {step.number} was computed with the model in evaluation mode, unlike those before"
            self._p.context.log.emit(RunNote(text=f"{text}: call model.train() after validating"))
        collected = self._collect(step)
        if self._p.options.by_trainer:
            self._leave_to_trainer(collected)
            return
        with self._hooks.update():
            assert self._buffers is not None
            self._step_update.make(collected.finite, self._buffers)
        self._updated(collected)

    def _collect(self, step: Step) -> Collected:
        """End the step on all machines. Then its mean gradient is in `.grad`."""
        at = time.monotonic()
        if self._ranks is not None:
            self._finish()
        given.check_frozen(self._frozen)
        if given.held(self._p.optimizer) != self._held:
            given.check_added(self._p.optimizer, self._trained)
        # Before the guests' parts are added to it: they are measured by it.
        own = own_norm(self._trained) if self._hub.judges() else None
        whole = self._p.ledger.global_batch
        result = self._hub.end_step()
        total = None if self._ranks is None else self._sum_of_ranks(step, result, whole)
        divisor = self._divisor.of(step, result.guests_items, whole, total)
        norm: Tensor | float = prepare_gradients(
            step.number, self._trained, self._p.options, self._p.model, None if step.has_means else divisor
        )
        finite: Tensor | bool
        if self._ranks is not None:
            finite = self._ranks.agree(torch.as_tensor(norm).isfinite())
        elif self._device.ahead:
            finite = torch.as_tensor(norm).isfinite()
        else:  # nothing is waited for: a number costs less than tensors of one
            norm = float(norm)
            finite = math.isfinite(norm)
        if self._saves is not None:
            self._saves.writer.before_update()
        return Collected(
            step=step, result=result, at=at, divisor=divisor, norm=norm, own=own, finite=finite, total=total
        )

    def _leave_to_trainer(self, collected: Collected) -> None:
        """The trainer steps its optimizer next. Without gradients that changes nothing."""
        step = collected.step
        if not bool(collected.finite):
            assert self._buffers is not None
            self._buffers.put_back()
            for parameter in self._trained:
                parameter.grad = None
        step.loss = mean_of(step.loss_sum() + collected.result.guests_loss_sum, float(collected.divisor))

        def updated() -> None:
            self._updated(collected)
            self._returned = time.monotonic()

        self._hooks.leave_to_trainer(updated)

    def _updated(self, collected: Collected) -> None:
        """Report a step whose update was queued on the device."""
        step, result, divisor = collected.step, collected.result, collected.divisor
        norm, own, finite, total = collected.norm, collected.own, collected.finite, collected.total
        guests_loss, samples = result.guests_loss_sum, self._own_samples
        takes_loss = self._scheduling.takes_loss
        if not takes_loss:
            self._scheduling.step()
        losses = later(self._device, [step.loss_so_far()] if total is None else total)
        items = [divisor] if isinstance(divisor, Tensor) else []
        norms = later(self._device, [norm, norm if own is None else own, finite, *items])
        if self._comparing:
            self._compare_ranks()
        every = self._p.context.config.checkpoint_every
        if self._saves is not None and every > 0 and self._p.ledger.step % every == 0:
            self._checkpoint_due = True
        number, outside = self._p.ledger.step, self._outside
        data, self._data = self._data, DataTimes()

        def updated(now: float, update_s: float) -> None:
            own_loss, *of_ranks = losses()
            loss_sum = own_loss + (guests_loss if total is None else 0.0)
            total_norm, ours, applied, *counts = norms()
            count = float(counts[0] if counts else divisor)
            self._done, self._loss = number, mean_of(loss_sum, count)
            step.loss = self._loss
            facts = StepFacts(
                step=number,
                norm=total_norm,
                own_norm=None if own is None else ours,
                own_loss=own_loss,
                machines=tuple(result.samples),
                bad_ranks=[rank for rank, bad in enumerate(of_ranks[TOTALS - 1 :]) if bad],
                count=count,
                sizes=result.micro_batches.get(self._p.context.name, ()),
            )
            self._judge(facts, samples, applied=bool(applied))
            self._telemetry.step_ended(
                number, self._loss, result, update_s, now, applied=bool(applied), outside=outside, data=data
            )

        step.loss_when_known(self._flight.finish)
        self._flight.follows(collected.at, updated)
        if not self._device.ahead or self._ranks is not None or takes_loss:
            self._flight.finish()
            if takes_loss:
                self._scheduling.step(self._loss)
            self._stop_if_bad()

    def _judge(self, facts: StepFacts, samples: int, *, applied: bool) -> None:
        """Handle the result of a step's update, and log it if it was not applied. `samples`: this machine's own."""
        if applied:
            self._bad.good()
        else:
            self._p.context.log.emit(self._bad.bad(facts))
        if facts.own_norm is not None:
            # Who found no finite loss in samples of which this machine finds none either was not wrong.
            norm = facts.own_norm if math.isfinite(facts.own_loss) else math.nan
            self._hub.judged(facts.step - 1, norm, samples, applied=applied)

    def _stop_if_bad(self) -> None:
        """End the run after too many steps in a row that were not applied: it will not recover by itself."""
        if (why := self._bad.enough) is not None:
            raise self._not_finite(why)

    def _not_finite(self, what: str) -> NonFiniteError:
        saved_step = None
        if self._saves is not None:
            with contextlib.suppress(Exception):  # of one error it is told, and this one ends the run
                self._saves.writer.wait()
            saved_step = self._saves.saved_step
        context = self._p.context
        resume = None if context.folder is None else context.again(context.folder.path)
        again = how_to_go_on(saved_step, resume, by_trainer=self._p.options.by_trainer)
        hint = f"{self._bad.hint}; {again}" if self._bad.hint else again
        return NonFiniteError(what, hint=hint, step=self._done)

    def _sum_of_ranks(self, step: Step, guests: StepResult, samples: int) -> Tensor:
        """Sum the gradients of all ranks (this rank's include the guests') on every rank. Returns the summed
        totals."""
        assert self._ranks is not None
        every = self._p.context.config.check_replica_every
        self._comparing = every > 0 and (step.index + 1) % every == 0
        self._ranks.update(compare=self._comparing, samples=samples)
        finite = own_norm(self._trained).isfinite()
        loss, items, *counts = step.totals()
        totals = [loss + guests.guests_loss_sum, items + guests.guests_items, *counts]
        return self._ranks.sum_gradients(self._trained, totals, finite)

    def _compare_ranks(self) -> None:
        assert self._ranks is not None
        names = [t.name for t in self._p.tensors.fingerprint if t.role == "trained"]
        self._ranks.compare_weights(names, self._trained, self._p.ledger.step)

    # -- stopping and saving ----------------------------------------------------------------------------

    def _stop_if_asked(self) -> None:
        """A trainer saves by itself, so this ends after the step."""
        if self._p.context.loop.stop_requested() and not self._p.options.by_trainer:
            if self._ranks is not None:
                self._finish()
                # torchrun also asks us to stop when a rank has died: that rank will not hear this.
                self._ranks.end(strict=True)
            self._abandon()
            self._interrupted = True
            raise self._p.context.interruption

    def _abandon(self) -> None:
        """Undo the current step: a resumed run begins it again with the same random numbers."""
        if self._beginning is not None:
            self._beginning.undo()
        self._abandoned = True

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """The error if values that are not finite were not saved; it says how to resume."""
        try:
            yield
        except NonFiniteError as error:
            raise self._not_finite(error.what) from error
