"""Owns the modes a recipe computes in: number formats, and evaluation without gradients.

It knows torch alone, no recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

Precision = Literal["fp32", "bf16"]


def precision(device: torch.device, chosen: Precision) -> contextlib.AbstractContextManager[object]:
    """Matrix products in the chosen format within this context; weights stay what they are."""
    if chosen == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients and the model in evaluation mode within this context; afterwards each part as it was."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        # Not model.train(): a part that somebody keeps in evaluation mode (a frozen norm) must stay in it.
        for part in training:
            part.training = True
