"""The training loop on the host's other ranks: computes the samples that rank 0 sends, and makes the same update as
rank 0.

It has no folder, guests, figures or decisions: rank 0 has these.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from potluck.errors import CheckpointError, LoopError, RankGoneError
from potluck.hub.model_tensors import ModelTensors
from potluck.train import host_ranks as orders
from potluck.train.beginning import Buffers
from potluck.train.checkpoint import load_latest
from potluck.train.context import RunContext
from potluck.train.data import Loader, to_device
from potluck.train.flight import Flight
from potluck.train.host_ranks import RankDone, RankReady, Ranks
from potluck.train.optimizer_state import Stateful
from potluck.train.options import Options
from potluck.train.scheduling import Scheduling
from potluck.train.script_state import ScriptState
from potluck.train.step import Step, StepRules, mean_of
from potluck.train.update import Update, own_norm, prepare_gradients

LAST_WORDS_S = 2.0


@dataclass(slots=True, kw_only=True)
class RankParts:
    """The model and everything needed to train it here."""

    context: RunContext
    options: Options
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    tensors: ModelTensors


class RankTrainer:
    """Follows rank 0 through the steps of one training."""

    def __init__(self, parts: RankParts, ranks: Ranks) -> None:
        self._p, self._ranks = parts, ranks
        self._device = parts.context.device
        self._trained = parts.tensors.trained
        self._rules = StepRules(
            batches=self._batches,
            after_backward=self._after_backward,
            loss_is=parts.options.loss_is,
            trained=self._trained,
        )
        self._flight = Flight(self._device, lambda samples, seconds: ranks.done())
        self._scheduling = Scheduling(parts.options.scheduler, parts.optimizer)
        self._step_update = Update(parts.optimizer, queues=bool(self._device.ahead))

    def steps(self) -> Iterator[Step]:
        """The same steps as rank 0's. When the training ends, this process ends."""
        step: Step | None = None
        try:
            while (order := self._ranks.order()).what != orders.END:
                epoch, ends = order.samples
                step = Step(
                    order.number,
                    self._rules,
                    epoch=epoch,
                    ends_epoch=lambda ends=ends: bool(ends),  # type: ignore[misc]
                )
                yield step
                if not step.finished:
                    raise LoopError(
                        f"step {step.number} was left before all its samples were computed",
                        hint="let `for batch in step` run to its end; break out of the outer loop instead",
                    )
            self._over()
        except GeneratorExit:
            if step is not None and step.finished:
                self._left_the_loop(step)
            raise

    def _over(self) -> NoReturn:
        raise RankDone(0)

    def _left_the_loop(self, step: Step) -> None:
        """The loop was left by `break` or by an exception. Both look the same here, and nothing can be raised.

        If rank 0 has left too, this process ends immediately: only rank 0 runs the code after the loop.
        """
        words = (
            f"rank {self._ranks.place.rank} left the training loop after step {step.index + 1}, rank 0 did not\n"
            "hint: unless an exception follows: leave the loop `if run.is_host`, or with steps=…"
        )
        try:
            if self._ranks.order().what == orders.END:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        except RankGoneError as error:
            words = str(error)
        print(f"error: {words}", file=sys.stderr, flush=True)
        # An exception has this long to be shown. What follows the loop must not be done here.
        end = threading.Timer(LAST_WORDS_S, os._exit, (LoopError.exit_status,))
        end.daemon = True
        end.start()

    def _batches(self, step: Step) -> Iterator[Any]:
        self._device.at_step(step.index + 1)
        seed(self._p.options.seed, step.index, self._ranks.place.rank)
        buffers = Buffers(self._p.model)
        for parameter in self._trained:
            parameter.grad = None
        while (order := self._ranks.order()).what != orders.UPDATE:
            if order.what == orders.END:
                self._over()
            if order.what == orders.LAND:
                self._flight.finish()
                continue
            began = time.monotonic()
            if order.samples:
                batch = to_device(self._p.loader.fetch(order.samples), self._device)
                step.hand_out(len(order.samples))
                if not self._device.ahead:
                    self._device.begin(len(order.samples))
                yield batch
                step.check_done()
            self._flight.launched(len(order.samples), began)
        self._update(step, buffers, order.samples[0], compare=bool(order.number))

    def _after_backward(self, samples: int) -> None:
        if not self._device.ahead:
            self._device.end()

    def _update(self, step: Step, buffers: Buffers, samples: int, *, compare: bool) -> None:
        """Make the update. The gradient, the weights and the optimizer are equal on every rank, so they stay
        equal."""
        options = self._p.options
        finite = own_norm(self._trained).isfinite()
        total = self._ranks.sum_gradients(self._trained, step.totals(), finite)
        divisor = step.divisor(total, samples)
        norm = prepare_gradients(step.number, self._trained, options, self._p.model, divisor)
        self._step_update.make(self._ranks.agree(torch.as_tensor(norm).isfinite()), buffers)
        step.loss = mean_of(float(total[0]), divisor)
        self._scheduling.step(step.loss)
        if compare:
            self._ranks.show_weights(self._trained)


def seed(base: int, step: int, rank: int) -> None:
    """Seed this rank's own random numbers. They do not depend on earlier steps, so a resumed run draws the same."""
    number = int(np.random.SeedSequence([base % 2**32, step, rank]).generate_state(1, np.uint32)[0])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def about_rank(tensors: ModelTensors, samples: int | None, free_bytes: int | None) -> RankReady:
    model = hashlib.blake2b(repr(tensors.fingerprint).encode(), digest_size=8).hexdigest()
    return RankReady(model=model, samples=samples, free_bytes=free_bytes)


def restore_same(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: dict[str, Stateful],
    state: ScriptState,
) -> None:
    """Resume from the checkpoint that rank 0 has loaded."""
    loaded = load_latest(path.parent)
    if loaded is None or loaded.path.resolve() != path:
        raise CheckpointError(
            f"rank 0 resumes from {path}, which this rank cannot read",
            hint="all ranks of a host must see the same run folder",
        )
    loaded.restore(model, optimizer, objects, state)


def refuse_synchronized(model: nn.Module) -> None:
    """SyncBatchNorm waits for every rank in every micro-batch, but only rank 0 computes a guest's parity check."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        raise LoopError(
            "the model has SyncBatchNorm layers, which wait for all ranks even when only rank 0 computes",
            hint="give a host of several ranks the model with plain BatchNorm, or with GroupNorm",
        )
