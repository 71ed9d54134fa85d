"""Finds buffers that computing changes, because every guest computes with copies of its own.

Compares identities, and torch's counts of changes in place, before and after a micro-batch: it copies nothing and
waits for no device.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

HARMLESS = ("_SpectralNorm", "SpectralNorm")
"""Modules and hooks whose vectors follow the weights on every machine, so guests' gradients stay equal."""


class ChangedBuffers:
    """Looks at a few steps of a model. In the first one, it may still fill its tables."""

    def __init__(self, model: nn.Module, tell: Callable[[str, tuple[str, ...]], None]) -> None:
        """`tell` gets the type of the first changed buffer's module, and the names of all that have changed."""
        self._modules = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, _NormBase)
            and not any(type(own).__name__ in HARMLESS for own in (module, *module._forward_pre_hooks.values()))
        ]
        self._tell = tell
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._looked = 0

    def before(self, steps_done: int) -> None:
        """Call before a micro-batch. It looks at the first one of the second, fourth, eighth, … step."""
        if steps_done != self._looked and not steps_done & (steps_done + 1):
            self._looked = steps_done
            self._before = {name: (tensor, _version(tensor)) for name, tensor, _ in self._present()}

    def after(self) -> None:
        if not self._before:
            return
        kind, names = "", []
        for name, tensor, module in self._present():
            before, version = self._before.get(name, (None, 0))
            if before is None or before.shape != tensor.shape:
                continue  # a table that grows with the samples
            if before is not tensor or version != _version(tensor):
                kind = kind or type(module).__name__
                names.append(name)
        self._before = {}
        if names:
            self._tell(kind, tuple(names))

    def _present(self) -> list[tuple[str, Tensor, nn.Module]]:
        return [
            (f"{prefix}.{name}".lstrip("."), tensor, module)
            for prefix, module in self._modules
            for name, tensor in module._buffers.items()
            if tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
        ]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
