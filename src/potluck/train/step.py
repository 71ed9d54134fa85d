"""One step in the user's loop: batches to compute, `backward`, and the loss at the end.

Owns the contract between our iterators and the user's loop body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import LoopError
from potluck.train.given import NO_SCALER

FIRST_SCALE = 2.0**16
HOLDS_MEANS = (torch.float32, torch.float64)
"""Types of a loss whose gradient may be a fraction: bf16 rounds 1/7 by 0.2 %, and with it all gradients."""
TOTALS = 4
"""How many figures `Step.totals` has."""


@dataclass(slots=True)
class Current:
    """The micro-batch that the user's loop computes."""

    samples: int
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Settings that are the same in all steps of a loop."""

    batches: Callable[[Step], Iterator[Any]]
    after_backward: Callable[[int], None]
    """Called with the number of samples."""
    loss_is: str
    trained: Sequence[nn.Parameter] = ()
    """Parameters whose gradients the loop's body must not change."""
    sends: bool = False
    """Whether the gradients are consumed after backward."""


class Step:
    """Iterate over it for this machine's micro-batches; call `backward` with each one's loss.

    When the iteration ends, the step is complete: on the host the weights have been updated.
    """

    def __init__(
        self,
        index: int,
        rules: StepRules,
        *,
        epoch: int | None = None,
        ends_epoch: Callable[[], bool] = lambda: False,
        whole: int | None = None,
    ) -> None:
        """`whole`: the step's number of samples if this process computes them all; then backward computes means
        directly."""
        self.index = index
        """The number of this step, from 0."""
        self.epoch = epoch
        """The number of the epoch that its first sample belongs to, from 0."""
        self._ask_ends_epoch = ends_epoch
        self._ends_epoch: bool | None = None
        self._loss: float | None = None
        self._know_loss: Callable[[], None] | None = None
        self.finished = False
        self._rules = rules
        self._mean = rules.loss_is == "mean"
        self._whole = whole
        self._summed = False
        self._current: Current | None = None
        self._loss_sum: Tensor | float = 0.0
        self._items: Tensor | float = 0.0
        self.counts_items: bool | None = None
        """Whether backward was given items; None before the first one."""
        self._started = False
        self._marks: list[tuple[int, int] | None] = []

    @property
    def number(self) -> int:
        """The number of this step from 1, as errors and views count."""
        return self.index + 1

    def __iter__(self) -> Iterator[Any]:
        if self._started:
            raise LoopError(f"step {self.number} was iterated over twice", hint="use one `for batch in step` loop")
        self._started = True
        yield from self._rules.batches(self)
        self.finished = True

    def backward(self, loss: Tensor, items: float | Tensor | None = None) -> None:
        """Add this micro-batch's gradient to the step's, weighted by its samples, or by its `items`.

        `items`: number of tokens, pixels or pairs that the loss is the mean of. The step's gradient is then the
        mean over the items of all its micro-batches on all machines. Potluck does not wait for a count on a GPU.
        """
        current = self._current
        if current is None:
            raise LoopError(
                "step.backward() was called without a batch",
                hint="call it inside `for batch in step`",
                step=self.number,
            )
        if current.done:
            raise LoopError(
                "step.backward() was called twice for one batch",
                hint="add the losses: step.backward(loss_a + loss_b)",
                step=self.number,
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise LoopError(
                "step.backward() needs the loss: a tensor of one value that depends on the model",
                hint='the mean over the samples of the batch; for a sum use run.steps(…, loss_is="sum")',
                step=self.number,
            )
        if self.index == 0 and self.counts_items is None and _is_scaled(loss):  # once: on a GPU this waits
            raise LoopError("the loss was scaled by a GradScaler", hint=NO_SCALER, step=self.number)
        self._check_gradients()
        weight = self._weight(items, current.samples)
        if isinstance(weight, Tensor) and self._mean:
            total = torch.where(weight > 0, loss * weight, 0.0)
            total.backward()
            self._add_loss(total.detach(), 1.0)
        elif not self._mean or weight:
            factor = float(weight) if self._mean else 1.0
            if loss.dtype not in HOLDS_MEANS and not self._summed:
                self._whole = None
            self._summed = True
            # The gradient of `loss * factor`, without a product more in the graph; of 1, as torch makes it itself.
            part = factor / (self._whole or 1) if self.has_means else factor
            loss.backward(None if part == 1 else torch.full_like(loss.detach(), part))
            self._add_loss(loss, factor)
        # else: a mean over nothing weighs nothing, and is NaN
        current.done = True
        self._rules.after_backward(current.samples)

    def _add_loss(self, loss: Tensor, factor: float) -> None:
        """A loss on a GPU stays there. Otherwise it becomes a number, which costs less than a tensor."""
        self._mark_gradients()
        self._loss_sum = self._loss_sum + (loss.item() if loss.is_cpu else loss.detach().float()) * factor

    def _weight(self, items: float | Tensor | None, samples: int) -> float | Tensor:
        """The factor of a mean: the number of samples, or of items, which are then counted."""
        counts = items is not None
        if self.counts_items is not None and self.counts_items != counts:
            raise LoopError(
                "step.backward() was called with items=… for some batches of a step, and without for others",
                hint="give items=… for every batch, 0 where there are none, or for no batch",
                step=self.number,
            )
        if items is None:
            self.counts_items = False
            return samples
        if isinstance(items, Tensor) and items.numel() == 1 and items.device.type != "cpu":
            count: float | Tensor = items.detach().reshape(())
        else:
            count = self._number(items)
        self.counts_items = True
        self._items = self._items + count
        return count

    def _number(self, items: Any) -> float:
        try:
            count = float(items)
        except (TypeError, ValueError, RuntimeError):
            count = math.nan
        if not 0 <= count < math.inf:
            shown = f"{items!r}" if isinstance(items, int | float) else f"a {type(items).__name__}"
            raise LoopError(
                f"step.backward() was given {shown} as items: it takes a number of 0 or more",
                hint="items=n where the loss is the mean of n tokens, pixels or pairs",
                step=self.number,
            )
        return count

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch; False on a guest.

        For a stream, this reads its next batch. Read it before the next step begins.
        """
        if self._ends_epoch is None:
            self._ends_epoch = self._ask_ends_epoch()
        return self._ends_epoch

    @property
    def loss(self) -> float | None:
        """After the step: the mean loss over all its samples, or items (on a guest: over its own).

        A GPU may still be computing it: reading it then waits.
        """
        if self._loss is None and self._know_loss is not None:
            self._know_loss()
        return self._loss

    @loss.setter
    def loss(self, value: float) -> None:
        self._loss = value

    # -- for the trainers -------------------------------------------------------------------------------

    def loss_when_known(self, wait: Callable[[], None]) -> None:
        """`wait` returns when `loss` has been set."""
        self._know_loss = wait

    def hand_out(self, samples: int) -> None:
        self._current = Current(samples)
        if self._rules.sends or not self._marks:  # otherwise `check_done` has just seen that they still hold
            self._mark_gradients()

    def _mark_gradients(self) -> None:
        """Remember the gradient tensors and how often each was written to. This needs no wait for the device."""
        self._marks = _marks(self._rules.trained)

    def _check_gradients(self) -> None:
        if self._marks != _marks(self._rules.trained):
            raise LoopError(
                "the gradients were changed in the loop, for example by zero_grad() or clip_grad_norm_()",
                hint="Potluck clears, sums and clips them: take zero_grad() out of the loop, and give clip_norm=… "
                "to run.steps(); before_update=… may change the gradient of the whole step",
                step=self.number,
            )

    def check_done(self) -> None:
        """After the user's body: `backward` must have been called."""
        if self._current is None or not self._current.done:
            raise LoopError(
                "a batch came back without step.backward(loss)",
                hint="call step.backward(loss), not loss.backward(), for every batch; none may be skipped",
                step=self.number,
            )
        if not self._rules.sends:
            self._check_gradients()
        self._current = None

    @property
    def has_means(self) -> bool:
        """Whether the gradients are divided by the step's samples already."""
        return self._whole is not None and not self.counts_items

    def loss_sum(self) -> float:
        """The summed loss of this machine's samples or items (waits for the device)."""
        return float(self._loss_sum)

    def loss_so_far(self) -> Tensor | float:
        """The same, on the device."""
        return self._loss_sum

    def items_so_far(self) -> Tensor | float | None:
        """This machine's items, on the device; None if samples are counted."""
        return self._items if self.counts_items else None

    def items(self) -> float | None:
        """The same, read (waits for the device)."""
        return float(self._items) if self.counts_items else None

    def mean_loss(self, samples: int) -> float:
        """The mean loss over this machine's `samples`, or their items."""
        items = self.items()
        return mean_of(self.loss_sum(), samples if items is None else items)

    def totals(self) -> list[Tensor | float]:
        """The figures that the host's ranks add up: loss, items, and a 1 if items were counted or if samples
        were."""
        return [self._loss_sum, self._items, float(self.counts_items is True), float(self.counts_items is False)]

    def divisor(self, totals: Tensor, samples: int) -> float:
        """The divisor of the ranks' summed gradient, from their summed `totals`. Waits for the device if items are
        counted."""
        if self.counts_items is False:
            return samples
        _, items, with_items, without = totals[:TOTALS].tolist()
        if with_items and without:
            raise LoopError(
                "step.backward() was called with items=… on some ranks, and without on others",
                hint="give items=… for every batch, 0 where there are none, or for no batch",
                step=self.number,
            )
        return float(items) if with_items else samples

    def reset_loss(self) -> None:
        self._loss_sum = self._items = 0.0
        self._marks = []

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, gradients, loss and items start at zero; afterwards they are added to the previous ones."""
        trained, loss, items = self._rules.trained, self._loss_sum, self._items
        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        self.reset_loss()
        yield
        with torch.no_grad():
            for parameter, gradient in zip(trained, before):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._loss_sum, self._items = loss + self._loss_sum, items + self._items
        self._marks = []


def mean_of(total: float, count: float) -> float:
    """The mean; NaN if there are no samples or items."""
    return total / count if count else math.nan


def _marks(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int] | None]:
    return [None if (g := p.grad) is None else (id(g), g._version) for p in parameters]


def _is_scaled(loss: Tensor) -> bool:
    """Whether it is a product with 65,536, the initial factor of a GradScaler."""
    made_by = loss.grad_fn
    factors = (getattr(made_by, name, None) for name in ("_saved_self", "_saved_other"))
    return type(made_by).__name__ == "MulBackward0" and any(
        isinstance(f, Tensor) and f.dim() == 0 and not f.requires_grad and float(f) == FIRST_SCALE for f in factors
    )


class SavedBytes:
    """Counts what autograd keeps for the backward while it is active: the size of a micro-batch's activations."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._on = False

    def start(self) -> None:
        self._hooks.__enter__()
        self._on = True

    def stop(self) -> int:
        if self._on:
            self._hooks.__exit__(None, None, None)
            self._on = False
        return self.bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base  # a layer keeps its weight as a view
        if not isinstance(owner, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        # Not the tensor itself: an operation that keeps its own output would then keep itself alive.
        return tensor.detach()
