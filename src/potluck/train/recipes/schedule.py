"""The learning-rate schedule that recipes share. Its only state is the number of steps, so a run resumed with more
steps follows the longer curve."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: torch.optim.Optimizer, *, steps: int, warmup: int, floor: float = 0.1) -> LambdaLR:
    """Rises linearly over `warmup` steps, then falls as a cosine to `floor` at the last step."""
    warmup = min(warmup, steps // 5)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (steps - warmup))
        return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
