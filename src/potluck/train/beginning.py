"""The state in which a step began, so that one that is abandoned leaves no trace.

Owns random numbers and buffers; weights and optimizer state do not change before a step's end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.device import Device
from potluck.train.randomness import RandomState

MOST_BUFFER_BYTES = 4 << 20
"""Larger buffers (masks, tables) are constants; a copy in every step would only cost time."""


class Beginning:
    """Taken when a step begins; `undo` puts everything back."""

    def __init__(self, device: Device, model: nn.Module) -> None:
        self._random = RandomState(device)
        buffers = list(model.buffers())
        small = sum(b.nbytes for b in buffers) <= MOST_BUFFER_BYTES
        self._buffers: list[tuple[Tensor, Tensor]] = [(b, b.clone()) for b in buffers] if small else []

    def undo(self) -> None:
        self._random.restore()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
