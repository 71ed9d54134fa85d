"""Controls who steps the optimizer: the loop, or a trainer that takes over the loop's gradients.

Owns the hooks on the optimizer. Any other step is refused, because the gradients would not be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from potluck.errors import LoopError
from potluck.failpoints import hit
from potluck.train import given


class UpdateHooks:
    """Watches one optimizer from the first step of a training to its end."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        changing: Callable[[], AbstractContextManager[None]],
        *,
        over: Callable[[], bool],
        by_trainer: bool,
    ) -> None:
        """`changing` is entered while the weights change. After the training is `over`, every step is allowed."""
        self._changing, self._over, self._by_trainer = changing, over, by_trainer
        self._inside = ExitStack()
        self._ours = False
        self._then: Callable[[], None] | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def waiting(self) -> bool:
        """Whether the trainer has not made the update that it must make."""
        return self._then is not None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Inside, the loop makes the update itself."""
        with self._made():
            self._ours = True
            yield
            self._ours = False

    @contextmanager
    def _made(self) -> Iterator[None]:
        with self._changing():
            hit("host.before-update")
            yield
            hit("host.updated")

    def leave_to_trainer(self, then: Callable[[], None]) -> None:
        """The gradients are complete: the trainer's next step is the update. `then` is called after it."""
        self._then = then

    def close(self) -> None:
        """Release the optimizer, and with it the model."""
        for hook in self._hooks:
            hook.remove()
        self._inside.close()

    def _before(self, *ignored: Any) -> None:
        if self._ours or self._over():
            return
        if self._then is not None:
            self._inside.enter_context(self._made())
            return
        if given.called_by_scaler():
            raise LoopError("scaler.step() was called in the loop", hint=given.NO_SCALER)
        if self._by_trainer:
            raise LoopError(
                "optimizer.step() was called before the gradients of the step were complete",
                hint="leave the update to the trainer: it makes one when all samples of the step are computed",
            )
        raise LoopError(
            "optimizer.step() was called in the loop; Potluck makes the update itself when the step is full",
            hint="take optimizer.step() and optimizer.zero_grad() out of the loop",
        )

    def _after(self, *ignored: Any) -> None:
        then, self._then = self._then, None
        self._inside.close()
        if then is None or self._over():
            return
        then()
