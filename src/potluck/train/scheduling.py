"""The user's learning-rate scheduler: owns that it is stepped once a step, and by nobody else."""

from __future__ import annotations

import math
from typing import Any

from potluck.errors import LoopError
from potluck.train import given


class Scheduling:
    """Steps the scheduler that was given, if there is one."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.takes_loss = given.takes_loss(scheduler)
        self._at = self._count()

    def step(self, loss: float | None = None) -> None:
        """After each step, whether its update was made or not: a schedule goes by steps. `loss`: the metric."""
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
                hint="was it made for fewer steps? A resumed run brings back the scheduler's own state, its number "
                "of steps included: keep `steps`, or start a new run",
            ) from error
        self._at = self._count()

    def _count(self) -> Any:
        return getattr(self._scheduler, "last_epoch", None)
