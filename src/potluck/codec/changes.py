"""Exact changes of weights for guests that compute in bf16: which values changed, and by how many steps of bf16.

Both ends round the weights that they hold to bf16. If bf16 values are numbered in order, two of them differ by a
whole number: mostly 0 if the learning rate is small. The message contains, coded by `coder.py`,

    a bit for each value that changed, the lowest bit first
    for each of these, its difference in one byte; -128: it is among the next ones
    each difference beyond 127 in two bytes, little-endian

A guest then has exactly the host's weights in bf16. The length of a message is not known in advance, but it is
never longer than thin's (`worth_sending`), and nothing is decoded beyond the size of its piece.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from potluck.codec import coder
from potluck.codec.names import BF16_CHANGES
from potluck.codec.tensors import spans
from potluck.errors import WireError

THIN_BITS = 1.89
"""Bits that thin needs for a value of the weights' change (docs/log.md)."""
MOST_CHANGED = 0.34
"""If more than this part of the values changed, their differences take more bits than thin (docs/log.md)."""
_WIDE = -128

Buffer = bytes | memoryview


def differences(target: Tensor, replica: Tensor) -> Tensor:
    """The difference of each of [count] float32 values from the replica's, in bf16 steps: [count] int16, modulo
    65,536."""
    found = torch.empty(target.numel(), dtype=torch.int16, device=target.device)
    for start, stop in spans(target.numel(), target.device):
        torch.sub(_numbers(target[start:stop]), _numbers(replica[start:stop]), out=found[start:stop])
    return found


def follow(target: Tensor, replica: Tensor) -> None:
    """Set the replica to the target in bf16."""
    for start, stop in spans(target.numel(), target.device):
        replica[start:stop] = _values(_numbers(target[start:stop]))


def apply(found: Tensor, values: Tensor) -> None:
    """Round [count] float32 values to bf16 and move each by its difference, in place."""
    for start, stop in spans(values.numel(), values.device):
        values[start:stop] = _values(_numbers(values[start:stop]).add_(found[start:stop]))


def worth_sending(found: Tensor, message: Buffer | None = None) -> bool:
    """Whether the differences, or their message, are shorter than thin's message."""
    if message is not None:
        return 8 * len(message) < THIN_BITS * found.numel()
    return int(torch.count_nonzero(found)) < MOST_CHANGED * found.numel()


def to_wire(found: Tensor) -> bytes:
    """The message of differences, [count] int16 in host memory."""
    flat = found.numpy()
    changed = flat != 0
    some = flat[changed]
    wide = (some > 127) | (some < -127)
    small = some.astype(np.int8)
    small[wide] = _WIDE
    return b"".join(coder.coded(np.packbits(changed, bitorder="little"), small, some[wide]))


def from_wire(message: Buffer, count: int) -> Tensor:
    """The differences of `count` values in a message.

    Raises WireError if it is not a message for this many values.
    """
    if 8 * len(message) >= max(THIN_BITS * count, 512):
        raise WireError(f"{len(message)} bytes for {count} values in {BF16_CHANGES}")
    flags = -(-count // 8)
    rest = coder.decoded(message, flags + 3 * count, BF16_CHANGES)

    def take(nbytes: int) -> np.ndarray:
        nonlocal rest
        part, rest = rest[:nbytes], rest[nbytes:]
        if len(part) != nbytes:
            raise WireError(f"a {BF16_CHANGES} message that ends before all of its {count} values")
        return part

    bits = np.unpackbits(take(flags), bitorder="little")
    changed = bits[:count].astype(bool)
    small = take(int(changed.sum())).view(np.int8)
    some = small.astype(np.int16)
    wide = small == _WIDE
    some[wide] = take(2 * int(wide.sum())).copy().view("<i2")
    if len(rest) or bits[count:].any():
        raise WireError(f"a {BF16_CHANGES} message that holds more than its {count} values")
    found = np.zeros(count, dtype=np.int16)
    found[changed] = some
    return torch.from_numpy(found)


def _numbers(values: Tensor) -> Tensor:
    """The number of each value, rounded to bf16, in the order of all bf16 values: [n] float32 -> [n] int16.

    Uses integers only, so that every device rounds in the same way: to the nearest, ties to even.
    """
    bits = values.view(torch.int32)
    rounded = bits.bitwise_right_shift(16).bitwise_and_(1).add_(bits).add_(0x7FFF).bitwise_right_shift_(16)
    return _turned(rounded.to(torch.int16))


def _values(numbers: Tensor) -> Tensor:
    """[n] int16 -> [n] float32."""
    return _turned(numbers).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)


def _turned(bits: Tensor) -> Tensor:
    """Convert between sign and magnitude and an ordered number; the function is its own inverse."""
    return bits.bitwise_right_shift(15).bitwise_and_(0x7FFF).bitwise_xor_(bits)
