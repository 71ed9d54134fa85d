"""The codec "thin": 4-bit codes with steps of a block's root mean square, made to be entropy coded.

The payload is laid out as int4's. A scale is `step` times its block's root mean square, so that most codes are 0, 1
or -1 and an entropy coder (entropy.py) needs about 2.1 bits for each. Scaling by the largest value, as int4 does,
gives steps of about 0.4 root mean squares and needs 3.4 bits. A block with a value beyond 7 steps is rare, and is
scaled as in int4, so that no code is clipped: clipped values would be sent late.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from potluck.balance.codecs import BLOCK
from potluck.codec.block import Int4Codec, rounded_up
from potluck.codec.names import DEFAULT_STEP
from potluck.codec.tensors import spans

MOST_RMS = 1e15
"""Below this no square of a value overflows float32; a block above it is scaled by its largest value."""


class ThinCodec(Int4Codec):
    """Codes of -7..7 that take about two bits each when sent; magnitudes up to about 7 * 2^125."""

    def __init__(self, step: float = DEFAULT_STEP) -> None:
        self.step = step
        self.name = "thin" if step == DEFAULT_STEP else f"thin:{step!r}"

    def scales(self, values: Tensor) -> Tensor:
        found = _root_mean_squares(values)
        # A block of which a value is not finite has no usable root mean square, and an infinite least scale.
        found.mul_(self.step).masked_fill_(~(found < self.step * MOST_RMS), 0.0)
        return rounded_up(torch.maximum(found, super().scales(values)).view(torch.int32))


def _root_mean_squares(values: Tensor) -> Tensor:
    """[count] float32 -> [blocks] float32; infinity or NaN where a square overflows."""
    count, left = values.numel(), values.numel() % BLOCK
    norms = values.new_empty(-(-count // BLOCK))
    for start, stop in spans(count - left, values.device, reducing=True):
        blocks = values[start:stop].view(-1, BLOCK)
        torch.linalg.vector_norm(blocks, dim=1, out=norms[start // BLOCK : stop // BLOCK])
    if left:
        torch.linalg.vector_norm(values[-left:].view(1, -1), dim=1, out=norms[-1:])
        norms[-1:].mul_(math.sqrt(BLOCK / left))
    return norms.mul_(1.0 / math.sqrt(BLOCK))
