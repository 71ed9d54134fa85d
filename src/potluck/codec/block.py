"""The codecs "int8" and "int4": small integers with one scale for every 128 values.

The payload of `count` values, in ceil(count / 128) blocks, is

    scales   one bf16 for each block
    codes    int8: one signed byte for each value
             int4: byte i of a block holds the codes of its values i (low) and i + 64 (high), as the signed
             byte low + 16 * high; of an unfinished last block only the bytes that say something are sent

and value = code * scale. A code has at most 8 bits and a bf16 has 8, so the product is exact in float32:
every device decodes the same bits, with or without fused multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from potluck.balance.codecs import BLOCK
from potluck.codec import fused
from potluck.codec.interface import Report
from potluck.codec.tensors import (
    EASY_NORM,
    MAGNITUDE,
    checked_payload,
    checked_values,
    destination,
    fits,
    norm,
    numbers,
    scratch,
    spans,
)

INFINITY = 0x7F80_0000  # as an integer, every finite magnitude is below it and every NaN above
SMALLEST = 0x0080_0000  # 2^-126, the smallest normal number: some devices take anything less for zero
ROUND_UP = 0x0000_FFFF  # added before the lower 16 bits are cut off, it rounds a magnitude up to bf16
BF16 = -0x0001_0000  # the upper 16 bits
NO_FRACTION = 1.5 * 2.0**23


class BlockCodec:
    """The common part of int8 and int4: blocks, scales, and the loop over both.

    A scale is the block's largest magnitude divided by the number of levels, rounded up to bf16, so that no
    code is ever clipped and no error is above half a scale. No scale is below 2^-126. Those of thin are larger.
    """

    name: str
    step: float = 0.0
    """The smallest scale, in root mean squares of its block."""
    levels: ClassVar[int]
    """The largest code; the smallest is its negative."""
    limit: ClassVar[int]
    """The bits of the first bf16 that is not a valid scale: from there on, some code decodes to infinity."""
    block_bytes: ClassVar[int]
    """Bytes of codes in a whole block."""

    def nbytes(self, count: int) -> int:
        whole, left = divmod(count, BLOCK)
        return 2 * (whole + (left > 0)) + whole * self.block_bytes + min(left, self.block_bytes)

    def encode(self, values: Tensor) -> Tensor:
        values = checked_values(values)
        return fused.encode(self, values) if fused.usable(values.device) else self._encode(values, None)

    def encode_reporting(self, values: Tensor, report: Report) -> Tensor:
        return self._encode(checked_values(values), report)

    def decode(self, payload: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        payload = checked_payload(payload, count, self.nbytes(count), self.name)
        out = destination(out, count, payload.device)
        if fused.usable(payload.device) and payload.data_ptr() % 2 == 0:
            fused.decode(self, payload, out)
            return out
        stored, codes = split(payload, count)
        scales = stored.to(torch.int32).bitwise_left_shift_(16).view(torch.float32).unsqueeze(1)
        for at, blocks, code_bytes in self._walk(count, payload.device):
            self.unpack(codes[code_bytes], scales[blocks], out[at].view(-1, BLOCK))
        left = count % BLOCK
        if left:
            padded = codes.new_zeros(self.block_bytes)
            sent = min(left, self.block_bytes)
            padded[:sent] = codes[-sent:]
            block = out.new_empty(1, BLOCK)
            self.unpack(padded, scales[-1:], block)
            out[-left:] = block[0, :left]
        return out

    def finite(self, payload: Tensor, count: int) -> bool:
        if not fits(payload, count, self.nbytes(count)):
            return False
        return self.usable(split(payload.contiguous(), count)[0])

    def most_norm(self, payload: Tensor, count: int) -> float:
        # As if every value had the largest code, a hostile one: for what is spread evenly that is thrice too much.
        stored = split(payload.contiguous(), count)[0]
        length = norm(stored.view(torch.bfloat16))
        if length >= EASY_NORM and not self.usable(stored):
            return math.inf
        return (self.levels + 1) * math.sqrt(min(count, BLOCK)) * length

    def _encode(self, values: Tensor, report: Report | None) -> Tensor:
        count = values.numel()
        payload = torch.empty(self.nbytes(count), dtype=torch.uint8, device=values.device)
        stored, codes = split(payload, count)
        scales = self.scales(values)
        stored.copy_(scales.view(torch.int16)[1::2])
        scales = scales.unsqueeze(1)
        inverses = scales.reciprocal()
        if report is not None and not self.usable(stored):
            report = None
        room = scratch(count, values.device)
        for at, blocks, code_bytes in self._walk(count, values.device):
            levels = room[: at.stop - at.start].view(-1, BLOCK)
            _round(torch.mul(values[at].view(-1, BLOCK), inverses[blocks], out=levels))
            self.pack(levels, codes[code_bytes])
            if report is not None:
                report(at.start, levels.mul_(scales[blocks]).view(-1))
        left = count % BLOCK
        if left:
            levels = values.new_zeros(1, BLOCK)
            _round(torch.mul(values[-left:], inverses[-1], out=levels[0, :left]))
            padded = codes.new_empty(self.block_bytes)
            self.pack(levels, padded)
            sent = min(left, self.block_bytes)
            codes[-sent:] = padded[:sent]
            if report is not None:
                report(count - left, levels.mul_(scales[-1])[0, :left])
        return payload

    def _walk(self, count: int, device: torch.device) -> Iterator[tuple[slice, slice, slice]]:
        """The whole blocks of a piece, some at a time: ranges of the values, the scales and the codes."""
        for start, stop in spans(count - count % BLOCK, device):
            first, last = start // BLOCK, stop // BLOCK
            code_bytes = slice(first * self.block_bytes, last * self.block_bytes)
            yield slice(start, stop), slice(first, last), code_bytes

    def usable(self, stored: Tensor) -> bool:
        """True if every code decodes to a finite value under these scales, [blocks] int16 bits of bf16."""
        return stored.numel() == 0 or bool((stored & 0x7FFF).amax() < self.limit)

    def scales(self, values: Tensor) -> Tensor:
        """[count] float32 -> [blocks] float32 that bf16 holds exactly."""
        return _scales(_peaks(values), self.levels)

    def pack(self, levels: Tensor, codes: Tensor) -> None:
        """[blocks, BLOCK] float32 that are whole numbers -> [blocks * block_bytes] int8."""
        raise NotImplementedError

    def widen(self, codes: Tensor, out: Tensor) -> None:
        """[blocks * block_bytes] int8 -> [blocks, BLOCK] float32 that are whole numbers."""
        raise NotImplementedError

    def unpack(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """[blocks * block_bytes] int8 and [blocks, 1] float32 -> [blocks, BLOCK] float32."""
        self.widen(codes, out)
        out.mul_(scales)


class Int8Codec(BlockCodec):
    """Codes of -127..127: 1.0156 bytes per value, magnitudes up to about 127 * 2^121."""

    name = "int8"
    levels = 127
    limit = (127 + 121) << 7  # 2^121: a hostile code of -128 is finite too
    block_bytes = BLOCK

    def pack(self, levels: Tensor, codes: Tensor) -> None:
        codes.view(-1, BLOCK).copy_(levels)

    def widen(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(-1, BLOCK))


class Int4Codec(BlockCodec):
    """Codes of -7..7: 0.5156 bytes per value, magnitudes up to about 7 * 2^125."""

    name = "int4"
    levels = 7
    limit = (127 + 125) << 7  # 2^125: a hostile code of -8 is finite too
    block_bytes = BLOCK // 2

    def pack(self, levels: Tensor, codes: Tensor) -> None:
        # As floats: the sum is exact and takes one pass, where shifts of integers take three.
        pairs = torch.add(levels[:, : BLOCK // 2], levels[:, BLOCK // 2 :], alpha=16)
        codes.view(-1, BLOCK // 2).copy_(pairs)

    def widen(self, codes: Tensor, out: Tensor) -> None:
        # Whatever the byte, both codes come out as -8..7: these sums wrap around.
        pairs = codes.view(-1, BLOCK // 2)
        both = torch.empty(out.shape, dtype=torch.int8, device=out.device)
        high = torch.add(pairs, 8, out=both[:, BLOCK // 2 :]).bitwise_right_shift_(4)
        torch.add(pairs, high, alpha=-16, out=both[:, : BLOCK // 2])
        out.copy_(both)


def split(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A payload's scales, [blocks] int16 that are the bits of bf16, and its codes, [n] int8."""
    end = 2 * -(-count // BLOCK)
    return numbers(payload[:end], torch.int16), payload[end:].view(torch.int8)


def _round(levels: Tensor) -> None:
    """Round to the nearest whole number, in place; for magnitudes below 2^22.

    A sum that large has no bits left for a fraction, and the difference is exact. Tensor.round_ would also work,
    but it uses other cores at any size, and rounds small negative numbers to -0.0, to which no code decodes.
    """
    levels.add_(NO_FRACTION).sub_(NO_FRACTION)


def _peaks(values: Tensor) -> Tensor:
    """The largest magnitude of each block, as bits: [count] float32 -> [blocks] int32."""
    left = values.numel() % BLOCK
    bits = values.view(torch.int32)
    found = bits.new_empty(-(-values.numel() // BLOCK))
    room = scratch(values.numel(), values.device).view(torch.int32)
    # A tensor, because a plain number would be made into one in every pass, which takes as long as the rest.
    mask = torch.tensor(MAGNITUDE, dtype=torch.int32)
    for start, stop in spans(values.numel() - left, values.device, reducing=True):
        magnitudes = torch.bitwise_and(bits[start:stop], mask, out=room[: stop - start])
        torch.amax(magnitudes.view(-1, BLOCK), 1, out=found[start // BLOCK : stop // BLOCK])
    if left:
        torch.amax(bits[-left:] & MAGNITUDE, 0, out=found[-1])
    return found


def _scales(peaks: Tensor, levels: int) -> Tensor:
    """[blocks] int32, the bits of magnitudes -> [blocks] float32 scales that bf16 holds exactly.

    NaN becomes infinity before any float operation, because devices treat NaN differently.
    """
    scales = peaks.clamp_(max=INFINITY).view(torch.float32).mul_(1.0 / levels).view(torch.int32)
    return rounded_up(scales)


def rounded_up(scales: Tensor) -> Tensor:
    """The bits of [blocks] float32 -> the next [blocks] float32 that bf16 holds exactly, none of them zero."""
    return scales.clamp_(min=SMALLEST).add_(ROUND_UP).bitwise_and_(BF16).view(torch.float32)
