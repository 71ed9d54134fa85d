"""Does a guest compute what the host computes? A sketch of a gradient, and the comparison of two.

Owns the thresholds. It knows no protocol: two sketches of the same batch at the same weights come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from potluck.spec.layout import TensorSpec

SKETCH_VALUES = 1 << 18
"""At most about this many values of the gradient are compared one by one; norms are compared of all tensors."""
MIN_COSINE = 0.98
MIN_COSINE_LOOSE = 0.3
MAX_NORM_RATIO = 1.2
MAX_NORM_RATIO_LOOSE = 3.0
MAX_LOSS_DIFFERENCE = 0.05
MAX_LOSS_DIFFERENCE_LOOSE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A gradient in small: the norm of every tensor, then values at a fixed stride; and the batch's mean loss."""

    values: np.ndarray
    tensors: int
    loss: float
    random: bool = False
    """The batch was computed with random numbers (dropout): another machine's gradient agrees only roughly."""

    @property
    def finite(self) -> bool:
        """Where the host's own is not, no guest can be measured against it."""
        return bool(np.isfinite(self.values).all() and np.isfinite(self.loss))


def sketch(
    gradients: Sequence[Tensor | None], sizes: Sequence[int], loss: float, *, random: bool = False
) -> Sketch:
    stride = max(1, sum(sizes) // SKETCH_VALUES)
    norms, values = [], []
    for gradient, size in zip(gradients, sizes):
        if gradient is None:
            norms.append(torch.zeros(1))
            values.append(torch.zeros(len(range(0, size, stride))))
            continue
        flat = gradient.detach().reshape(-1)
        norms.append(flat.float().norm().reshape(1).cpu())
        values.append(flat[::stride].float().cpu())
    return Sketch(values=torch.cat(norms + values).numpy(), tensors=len(sizes), loss=loss, random=random)


def compare(
    host: Sketch, received: memoryview | bytes, loss: float, *, names: Sequence[TensorSpec], loose: bool
) -> tuple[float, str | None]:
    """The cosine of the two gradients, and in words why the guest's cannot be trusted (None: it can)."""
    if len(received) != host.values.nbytes:
        return 0.0, f"its sketch has {len(received)} bytes, the host's {host.values.nbytes}"
    guest = np.frombuffer(received, dtype="<f4")
    if not np.isfinite(guest).all() or not np.isfinite(loss):
        return 0.0, "it is not finite (NaN or infinity)"
    # In float64: squares of small gradients vanish in float32.
    ours = host.values[host.tensors :].astype(np.float64)
    theirs = guest[host.tensors :].astype(np.float64)
    product = float(np.linalg.norm(ours)) * float(np.linalg.norm(theirs))
    if product == 0.0:
        same = bool((ours == theirs).all())
        return float(same), None if same else "one of the two gradients is zero"
    cosine = float(np.dot(ours, theirs) / product)
    allowed = MAX_LOSS_DIFFERENCE_LOOSE if loose else MAX_LOSS_DIFFERENCE
    if abs(loss - host.loss) > allowed * max(abs(host.loss), 0.1):
        return cosine, f"the loss is {loss:.4f} where the host has {host.loss:.4f}"
    if not cosine >= (MIN_COSINE_LOOSE if loose else MIN_COSINE):  # also where the host's own is NaN
        return cosine, f"the cosine of the two is {cosine:.4f}"
    worst = _worst_norm(host.values[: host.tensors], guest[: host.tensors])
    limit = MAX_NORM_RATIO_LOOSE if loose else MAX_NORM_RATIO
    if worst is not None and worst[1] > limit:
        return cosine, f"the gradient of {names[worst[0]].name} is {worst[1]:.1f} times off in size"
    return cosine, None


def _worst_norm(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, float] | None:
    """The tensor whose norm differs most, among those that carry at least a hundredth of the largest norm."""
    weighty = np.flatnonzero(ours > 0.01 * ours.max())
    if weighty.size == 0:
        return None
    small = np.maximum(theirs[weighty], 1e-30)
    ratio = np.maximum(ours[weighty] / small, small / ours[weighty])
    worst = int(ratio.argmax())
    return int(weighty[worst]), float(ratio[worst])
