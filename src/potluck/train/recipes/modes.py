"""Owns the modes a recipe computes in: number formats, and evaluation without gradients.

It knows torch alone, no recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", "yes", "no"]


def precision(device: torch.device, chosen: Precision) -> contextlib.AbstractContextManager[object]:
    """Matrix products in the chosen format within this context; weights stay what they are.

    "auto": bf16 where the device has matrix units for it (CUDA), fp32 elsewhere.
    """
    if chosen == "fp32" or (chosen == "auto" and device.type != "cuda"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def compiled(chosen: Compile, device: torch.device, *, guest: bool) -> bool:
    """Whether to compile the model. "auto": on CUDA, but not on a guest.

    A guest computes its first layers while the later ones' weights arrive, which a compiled model cannot.
    """
    return chosen == "yes" or (chosen == "auto" and device.type == "cuda" and not guest)


def fused(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer over these should do its update in one pass."""
    return all(parameter.device.type == "cuda" for parameter in parameters)


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
