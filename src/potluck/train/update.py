"""Makes the weights' update if the gradient is finite; otherwise nothing changes.

Owns the gradient's norm and the decision to update.

Usually the norm is read before the update. A fused optimizer of torch (`fused=True`) takes the answer as a tensor
instead, so a GPU that queues its work decides by itself, without a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.device import Device
from potluck.errors import LoopError
from potluck.hub.actions import StepResult
from potluck.train.beginning import Buffers
from potluck.train.options import Options
from potluck.train.step import Step

TOLD = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""These respect `found_inf`, which torch's GradScaler uses; classes derived from them may not."""
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Those of them that have a fused form on CUDA."""


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, on their device; not finite if one of them is not.

    For float16 it is computed in float32, because float16 ends at 65,504.
    """
    wide = _wide(gradients)
    if len({(g.device, g.dtype) for g in wide}) > 1:
        return nn.utils.get_total_norm(wide)
    # What torch does where all are alike, without its sorting: that took a small model two thirds of the time.
    together: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide)))
    return together


def norm_number(gradients: Sequence[Tensor]) -> float:
    """The same for gradients on the CPU, without one-value tensors, which take as long as the norms themselves."""
    return math.hypot(*[norm.item() for norm in torch._foreach_norm(_wide(gradients))])


def _wide(gradients: Sequence[Tensor]) -> list[Tensor]:
    plain = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return [g.float() if g.dtype == torch.float16 else g for g in plain]


def own_norm(trained: Sequence[nn.Parameter]) -> Tensor:
    """The norm of what this machine has computed so far, on its device."""
    gradients = [p.grad for p in trained if p.grad is not None]
    return total_norm(gradients) if gradients else torch.zeros((), device=trained[0].device)


class Divisor:
    """The divisor of a step's summed gradient: its samples, or its items on all machines."""

    def __init__(self) -> None:
        self._counts_items: bool | None = None  # whether the body says items=…; None before the first update

    def of(self, step: Step, guests_items: float, samples: int, total: Tensor | None) -> float | Tensor:
        """`total`: the ranks' summed totals, where there are several."""
        if step.counts_items is not None:
            if self._counts_items not in (None, step.counts_items):
                raise LoopError(
                    f"step {step.number} {'counts' if step.counts_items else 'does not count'} items, unlike the "
                    "steps before it",
                    hint="give step.backward() items=… in every step, or in none",
                )
            self._counts_items = step.counts_items
        if total is not None:
            return step.divisor(total, samples)
        own = step.items_so_far()
        if own is None:  # perhaps guests computed all of it
            return guests_items if self._counts_items else samples
        return own + guests_items


def prepare_gradients(
    number: int, trained: list[nn.Parameter], options: Options, model: nn.Module, divisor: float | Tensor | None
) -> Tensor | float:
    """Turn the sum over the step's samples or items into the optimizer's gradient: the mean, passed to
    `before_update`, clipped.

    Returns the norm before clipping: on the device, or a number if the gradients are on the CPU; NaN if there was
    nothing to sum. `divisor`: the number of samples or items; None if the gradients are already means.
    """
    if isinstance(divisor, int | float) and not divisor:
        return torch.full((), torch.nan, device=trained[0].device)
    gradients = [p.grad for p in trained if p.grad is not None]
    if not gradients:
        raise LoopError(
            f"step {number} ended without any gradient",
            hint="Potluck clears and steps: take optimizer.zero_grad() and optimizer.step() out of the loop",
        )
    if divisor is not None:
        torch._foreach_mul_(gradients, 1.0 / divisor)
    if options.before_update is not None:
        options.before_update(model)
        gradients = [p.grad for p in trained if p.grad is not None]
    if options.clip_norm is None and all(g.is_cpu for g in gradients):
        return norm_number(gradients)
    norm = total_norm(gradients)
    if options.clip_norm is not None:
        nn.utils.clip_grads_with_norm_(trained, options.clip_norm, norm)
    return norm


def later(device: Device, figures: Tensor | Sequence[Tensor | float]) -> Callable[[], list[float]]:
    """Read these figures, which waits for the device's present work."""
    if isinstance(figures, Tensor):
        return device.to_host_later(figures.reshape(-1)).tolist
    if not device.ahead:  # a tensor of them would cost more than all else that is told of a step
        numbers = [float(figure) for figure in figures]
        return lambda: numbers
    there = [f if isinstance(f, Tensor) else torch.full((), f, device=device.torch_device) for f in figures]
    return device.to_host_later(torch.stack([f.float() for f in there])).tolist


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Use the fused form of torch's own optimizers, if the user left the choice to torch.

    By default torch uses `foreach` on CUDA, which has no such switch: reading the norm first made an H200's steps
    of 142 ms 1.8 % longer. With the fused form they take as long as without the check (`bench/gpu/finite.py`).
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if type(optimizer) not in FUSED or not all(p.is_cuda and p.is_floating_point() for p in parameters):
        return
    groups = optimizer.param_groups
    if any(g["foreach"] is not None or g["fused"] is not None or g["differentiable"] for g in groups):
        return
    for group in groups:
        group["fused"] = True
    for parameter, state in optimizer.state.items():  # of a resumed run; torch kept the count on the CPU
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)


@dataclass(slots=True, kw_only=True)
class Collected:
    """A step whose gradients are complete and whose update is still to be made."""

    step: Step
    result: StepResult
    at: float
    """When this machine's own samples were computed (monotonic)."""
    divisor: float | Tensor
    """Number of samples or items that the gradient is the mean of."""
    norm: Tensor | float
    own: Tensor | None
    """The norm of this machine's own part, if there are guests."""
    finite: Tensor | bool
    total: Tensor | None
    """The summed loss of all ranks, if there are several."""


class Update:
    """Steps one optimizer once in every step of the training."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, queues: bool) -> None:
        """`queues`: the device queues work, so reading from it would make it wait."""
        self._optimizer, self._queues = optimizer, queues
        if queues:
            fuse(optimizer)

    def make(self, finite: Tensor | bool, buffers: Buffers) -> None:
        """Step the optimizer if `finite`, a bool on the device. Otherwise the buffers are also restored."""
        if isinstance(finite, Tensor) and self._queues and self._can_be_told():
            self._optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            try:
                self._optimizer.step()
            finally:
                del self._optimizer.found_inf  # type: ignore[attr-defined]
            buffers.put_back_unless(finite)
        elif bool(finite):
            self._optimizer.step()
        else:
            buffers.put_back()
            # A scheduler is stepped all the same; torch would warn that it was stepped before its optimizer.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _can_be_told(self) -> bool:
        """Not before the first update, because a fused optimizer would leave its new state unset."""
        optimizer = self._optimizer
        if type(optimizer) not in TOLD or not all(group.get("fused") for group in optimizer.param_groups):
            return False
        with_state = (g for g in optimizer.param_groups if g.get("momentum") != 0)  # SGD keeps nothing without it
        used = (p for group in with_state for p in group["params"] if p.grad is not None)
        return all(p in optimizer.state for p in used)
