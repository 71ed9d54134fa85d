"""Saves the state at the beginning of a step, so that an abandoned step leaves no trace.

Owns random numbers and buffers; weights and optimizer state do not change before a step's end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.device import Device
from potluck.train.randomness import RandomState

MOST_BUFFER_BYTES = 4 << 20
"""Larger buffers (masks, tables) are constants; a copy in every step would only cost time."""


class BufferPlaces:
    """The modules with buffers, kept because finding them in every step takes longer."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())

    def buffers(self) -> list[Tensor]:
        """The present buffers: a module may replace one, or register one in its forward."""
        now = {id(b): b for module in self._modules for b in module._buffers.values() if b is not None}
        return list(now.values())


class Buffers:
    """A model's buffers as they are now, such as running means; large ones are not kept."""

    def __init__(self, model: nn.Module | BufferPlaces) -> None:
        buffers = list(model.buffers())
        small = sum(b.nbytes for b in buffers) <= MOST_BUFFER_BYTES
        self._kept: list[tuple[Tensor, Tensor]] = [(b, b.clone()) for b in buffers] if small else []

    @torch.no_grad()
    def put_back(self) -> None:
        for buffer, before in self._kept:
            buffer.copy_(before)

    @torch.no_grad()
    def put_back_unless(self, flag: Tensor) -> None:
        """The same if `flag`, a bool on the device, is false, without waiting for the device."""
        for buffer, before in self._kept:
            buffer.copy_(torch.where(flag.to(buffer.device), buffer, before))


class Beginning:
    """Taken when a step begins; `undo` restores everything."""

    def __init__(self, device: Device, buffers: Buffers | None = None) -> None:
        self._random, self._buffers = RandomState(device), buffers

    def undo(self) -> None:
        self._random.restore()
        if self._buffers is not None:
            self._buffers.put_back()
