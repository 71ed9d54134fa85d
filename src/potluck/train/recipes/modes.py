"""Owns a recipe's modes of computing: number formats, and evaluation without gradients.

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
    """Inside this context, matrix products use the chosen format; weights keep theirs.

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


def compile_for_all_sizes(model: nn.Module) -> None:
    """Compile a model once for micro-batches of any size (see `any_size`).

    Without this option torch compiles small micro-batches separately, which took half a minute in the middle of a
    run when the first guest came: its check is a small one.
    """
    from torch import _inductor as inductor  # slow to import

    option = "triton.mix_order_reduction"
    known = option in inductor.list_options()
    model.compile(options={option: False} if known else None)


@contextlib.contextmanager
def any_size(model: nn.Module, *batch: Tensor) -> Iterator[None]:
    """Within this context a compiled model takes this batch, whatever its size, without compiling again."""
    if model._compiled_call_impl is None:
        yield
        return
    for tensor in batch:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # Of a single sample torch always makes a case of its own: half a minute of compiling for a moment's work.
    alone = batch[0].shape[0] == 1
    with torch.compiler.set_stance("force_eager") if alone else contextlib.nullcontext():
        yield


def fused(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer over these parameters should be fused."""
    return all(parameter.device.type == "cuda" for parameter in parameters)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside this context, no gradients and the model in evaluation mode. Afterwards each module's mode is
    restored."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        # Not model.train(): a part that is kept in evaluation mode (a frozen norm) must stay in it.
        for part in training:
            part.training = True
