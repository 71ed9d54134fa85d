"""Hides transfers behind computing on a guest: gates before the forward, buckets in the backward.

Owns the hooks on the model. It knows which pieces a module needs and which parameters complete a piece.

A module's forward waits only for the pieces of the parameters it owns, so that the first layers compute while the
later ones' weights still arrive. A piece of the gradient is sent as soon as the last of its parameters has its
final gradient. Both rest on assumptions about the model that the first batch (the parity check) confirms: a trained
parameter whose owner's forward was never called is waited for up front, and a parameter whose gradient came in more
than one part (re-entrant checkpointing) turns the early sending off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from potluck.hub.layout import Layout

Wait = Callable[[Sequence[int]], None]
Ready = Callable[[Sequence[int]], None]


class Overlap:
    """Hooks on one model, off until `computing` says otherwise."""

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter], layout: Layout) -> None:
        self._layout = layout
        self._number = {id(p): i for i, p in enumerate(trained)}
        self._pieces_of_module = {m: self._pieces_owned(m) for m in model.modules()}
        self._wait: Wait | None = None
        self._ready: Ready | None = None
        self._watching = False
        self._called: set[nn.Module] = set()
        self._gradients: Counter[int] = Counter()
        self._left: list[int] = []
        self.up_front: tuple[int, ...] = tuple(range(len(layout.pieces)))
        """Pieces to wait for before a forward begins: all of them, until one batch has been observed."""
        self.bf16 = False
        """Whether every layer with trained weights computes in bf16: by autocast, or because its weights are."""
        self._all_bf16 = True
        self.early = False
        """Whether pieces of the gradient may be sent during the backward."""
        self.reason = "no batch was watched yet"
        compiled = any(_is_compiled(m) for m in model.modules())
        # Before all other hooks: some of them (weight_norm) read the module's parameters. Not in a compiled model,
        # which would be traced through them; where a function around the model is compiled, it stops for them.
        before_forward = torch.compiler.disable(self._before_forward)
        self._handles = [
            module.register_forward_pre_hook(before_forward, prepend=True)
            for module, pieces in self._pieces_of_module.items()
            if pieces and not compiled
        ]
        self._handles += [p.register_post_accumulate_grad_hook(self._after_gradient) for p in trained]

    # -- learning ---------------------------------------------------------------------------------------

    def watch(self) -> None:
        """The next batch shows how this model behaves."""
        self._watching = True
        self._all_bf16 = True
        self._called.clear()
        self._gradients.clear()

    def conclude(self, model: nn.Module) -> None:
        """Decide what may overlap, from the batch that was observed."""
        self._watching = False
        reached = {i for m in self._called for i in self._owned(m)}
        late = [i for i in range(len(self._layout.tensors)) if i not in reached]
        self.bf16 = self._all_bf16 and not late
        if any(_is_compiled(m) for m in model.modules()):
            self.reason = "the model is compiled: its layers cannot be held one by one"
            return
        self.up_front = tuple(sorted({p for i in late for p in self._layout.pieces_of[i]}))
        self.early = max(self._gradients.values(), default=0) == 1
        self.reason = "" if self.early else "a gradient came in several parts"

    # -- computing --------------------------------------------------------------------------------------

    def computing(self, wait: Wait | None, ready: Ready | None) -> None:
        """Prepare a micro-batch: how to wait for pieces and, in the last one, what to call with final pieces."""
        self._wait = wait
        self._ready = ready if self.early else None
        self._left = [len(p.spans) for p in self._layout.pieces]

    def idle(self) -> None:
        self._wait = self._ready = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # -- hooks ------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if self._watching:
            self._called.add(module)
            self._all_bf16 = self._all_bf16 and _computes_in_bf16(module)
        if self._wait is not None:
            self._wait(self._pieces_of_module[module])

    def _after_gradient(self, parameter: Tensor) -> None:
        number = self._number[id(parameter)]
        if self._watching:
            self._gradients[number] += 1
        if self._ready is None:
            return
        final = []
        for index in self._layout.pieces_of[number]:
            # A piece has one span for each of its parameters.
            self._left[index] -= 1
            if self._left[index] == 0:
                final.append(index)
        if final:
            self._ready(final)

    def _owned(self, module: nn.Module) -> list[int]:
        return [self._number[id(p)] for p in module.parameters(recurse=False) if id(p) in self._number]

    def _pieces_owned(self, module: nn.Module) -> tuple[int, ...]:
        return tuple(sorted({p for i in self._owned(module) for p in self._layout.pieces_of[i]}))


def _computes_in_bf16(module: nn.Module) -> bool:
    """Whether a module whose forward is about to begin computes in bf16."""
    types = {p.device.type for p in module.parameters(recurse=False) if p.dtype != torch.bfloat16}
    return all(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16 for kind in types
    )


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
