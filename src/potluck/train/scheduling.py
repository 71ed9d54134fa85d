"""Steps the user's learning-rate scheduler once per step, and refuses other calls of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from potluck.errors import LoopError
from potluck.train import given


class Scheduling:
    """Steps the scheduler that was given, if there is one."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._changed_in: int | None = None
        self.takes_loss = given.takes_loss(scheduler)
        self._at = self._count()

    def step(self, loss: float | None = None) -> None:
        """Call after each step, whether its update was made or not, because a schedule counts steps. `loss`: the
        metric."""
        if self._scheduler is None or (self.takes_loss and (loss is None or not math.isfinite(loss))):
            return
        if self._count() != self._at:
            raise LoopError(
                "scheduler.step() was called in the loop, and Potluck steps the scheduler too",
                hint="take it out of the loop; or step it yourself, with also_save={'scheduler': …} instead of "
                "scheduler=…",
            )
        try:
            self._scheduler.step(*((loss,) if self.takes_loss else ()))
        except Exception as error:
            raise LoopError(
                f"the scheduler ({type(self._scheduler).__name__}) cannot be stepped: {error}",
                hint="was it made for fewer steps? A resumed run restores the scheduler's own state, its number "
                "of steps included: keep `steps`, or start a new run",
            ) from error
        self._at = self._count()

    def rates(self) -> list[Any]:
        """The present learning rates. For one that is a tensor, how often it was written to, which needs no wait
        for the device."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return [(id(r), r._version) if isinstance(r, torch.Tensor) else r for r in rates]

    def check(self, before: list[Any], step: int) -> None:
        """After the loop's body: refuse a scheduler that was stepped in it, once for each micro-batch.

        A script may set its own rate there, if it is the same for all micro-batches of a step. A torch scheduler on
        the optimizer is recognised by `initial_lr`.
        """
        if self.rates() == before:
            return
        again, self._changed_in = self._changed_in == step, step
        if again or any("initial_lr" in group for group in self._optimizer.param_groups):
            raise LoopError(
                "the learning rate was changed inside `for batch in step`, for example by scheduler.step()",
                hint="a step has any number of batches: step the scheduler after the inner loop, or give "
                "scheduler=… to run.steps()",
                step=step,
            )

    def _count(self) -> Any:
        return getattr(self._scheduler, "last_epoch", None)
