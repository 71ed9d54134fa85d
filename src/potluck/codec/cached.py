"""Packing and adding up on a CPU in the fewest passes: owns the rooms for it, which stay in a core's cache.

It must not know who sends the payloads, and changes nothing about them: the bits are those of the codecs.

What two ranks send each other is packed in pieces of 65,536 values. A piece goes through some ten operations while
it is in the cache. A view costs as much as a tenth of such an operation, and a plain number, which is made into a
tensor in each of them, even more: views are made for many pieces at once, and numbers once for all.
"""

from __future__ import annotations

import threading
from typing import TypeGuard

import torch
from torch import Tensor

from potluck.codec.block import BF16, BLOCK, INFINITY, NO_FRACTION, ROUND_UP, SMALLEST, BlockCodec
from potluck.codec.feedback import encode_with_feedback
from potluck.codec.interface import Codec
from potluck.codec.tensors import MAGNITUDE, checked_payload, spans

PIECE = 65_536
"""Values: two rooms of that many, and what is read and written, fit a core's own cache (1.25 MiB)."""

_BLOCKS = PIECE // BLOCK
_SCALES = 2 * _BLOCKS  # bytes
_CPU = torch.device("cpu")


def packed_bytes(codec: Codec, count: int) -> int:
    """The length of what `encode_into` makes of so many values."""
    return count // PIECE * codec.nbytes(PIECE) if _in_pieces(codec, count) else codec.nbytes(count)


def encode_into(codec: Codec, values: Tensor, residual: Tensor | None, packed: Tensor) -> None:
    """Encode `values + residual` and leave in `residual` what the payloads lost of it, as `encode_with_feedback`.

    Whole pieces have a payload each, one behind the other; anything else is one payload.

    Args:
        values: [count] float32, float16 or bfloat16, contiguous, in host memory; not changed.
        residual: [count] float32, changed in place; None: nothing is kept.
        packed: [packed_bytes(codec, count)] uint8, contiguous, at an even address; written.
    """
    count = values.numel()
    if not _in_pieces(codec, count):
        copied = values.to(torch.float32, copy=True)
        packed.copy_(codec.encode(copied) if residual is None else encode_with_feedback(codec, copied, residual))
        return
    room = _room()
    given = values.detach().view(-1, room.stride).unbind(0)
    kept = None if residual is None else residual.detach().view(-1, room.stride).unbind(0)
    stored, codes = _views(codec, packed, room.stride)
    for number, scales in enumerate(stored.unbind(0)):
        first = number * len(room.parts)
        for at, part in enumerate(room.parts, first):
            if kept is None:
                part.total.copy_(given[at])
            else:
                torch.add(given[at], kept[at], out=part.total)
            part.find_peaks()
        room.make_scales(_NUMBERS.inverse_levels[codec.levels])
        scales.copy_(room.upper_bits)
        keeps = kept is not None and int(scales.amax()) < codec.limit
        for at, part in enumerate(room.parts, first):
            torch.mul(part.totals, part.inverses, out=part.levels)
            if room.alone:
                part.level.round_()
            else:
                part.level.add_(_NUMBERS.no_fraction).sub_(_NUMBERS.no_fraction)
            codec.pack(part.levels, codes[at])
            if kept is not None and keeps:
                # The product is exact, and so the difference has one rounding, as in two steps.
                torch.addcmul(part.totals, part.levels, part.scales, value=-1, out=kept[at].view(-1, BLOCK))


def decode_sum(codec: Codec, first: Tensor, second: Tensor, out: Tensor, *, divide_by: int = 1) -> None:
    """What two results of `encode_into` decode to, added up and divided, into `out`.

    Args:
        out: [count] float32, float16 or bfloat16, contiguous, in host memory.

    Raises:
        WireError: one of them is none of this codec and size.
    """
    count = out.numel()
    if not _in_pieces(codec, count):
        total = codec.decode(first, count).add_(codec.decode(second, count))
        out.copy_(total.div_(divide_by) if divide_by > 1 else total)
        return
    room, nbytes = _room(), packed_bytes(codec, count)
    scales, codes = [], []
    for packed in (first, second):
        whole = checked_payload(packed, count, nbytes, codec.name)
        stored, found = _views(codec, whole.clone() if whole.data_ptr() % 2 else whole, room.stride)
        widened = stored.to(torch.int32).bitwise_left_shift_(_NUMBERS.half).view(torch.float32)
        scales.append(widened.view(-1, room.stride // BLOCK, 1).unbind(0))
        codes.append(found)
    direct = out.dtype == torch.float32
    results = out.detach().view(-1, room.stride // BLOCK, BLOCK).unbind(0)
    for at, into in enumerate(results):
        part = room.parts[at % len(room.parts)]
        codec.unpack(codes[0][at], scales[0][at], part.totals)
        codec.widen(codes[1][at], part.levels)
        # Products are exact, so the sum has one rounding, whichever of the two is multiplied here.
        total = torch.addcmul(part.totals, part.levels, scales[1][at], out=into if direct else part.totals)
        if divide_by > 1:
            total.div_(divide_by)
        if not direct:
            into.copy_(total)


def _in_pieces(codec: Codec, count: int) -> TypeGuard[BlockCodec]:
    return isinstance(codec, BlockCodec) and count > 0 and count % PIECE == 0


def _views(codec: BlockCodec, packed: Tensor, stride: int) -> tuple[Tensor, list[Tensor]]:
    """The scales of all pieces, [pieces, blocks] int16, and the codes, [n] int8 for every `stride` values."""
    pieces = packed.view(-1, codec.nbytes(PIECE))
    stored, codes = pieces[:, :_SCALES].view(torch.int16), pieces[:, _SCALES:].view(torch.int8)
    if stride == PIECE:
        return stored, list(codes.unbind(0))
    parts = codes.view(len(codes), PIECE // stride, -1)
    return stored, [part for piece in parts.unbind(0) for part in piece.unbind(0)]


class _Numbers:
    """Plain numbers as tensors."""

    def __init__(self) -> None:
        def whole(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int32)

        self.magnitude, self.infinity, self.smallest = whole(MAGNITUDE), whole(INFINITY), whole(SMALLEST)
        self.round_up, self.bf16, self.half = whole(ROUND_UP), whole(BF16), whole(16)
        self.no_fraction = torch.tensor(NO_FRACTION)
        self.inverse_levels = {levels: torch.tensor(1.0 / levels) for levels in (7, 127)}


_NUMBERS = _Numbers()


class _Part:
    """Views of a room for as many values as one operation may take."""

    __slots__ = ("_peaked", "inverses", "level", "levels", "scales", "total", "totals")

    def __init__(self, room: _Room, start: int, stop: int) -> None:
        blocks = slice(start // BLOCK, stop // BLOCK)
        self.total, self.level = room.total[start:stop], room.level[start:stop]
        self.totals, self.levels = self.total.view(-1, BLOCK), self.level.view(-1, BLOCK)
        self.scales = room.bits.view(torch.float32)[blocks].unsqueeze(1)
        self.inverses = room.inverses[blocks].unsqueeze(1)
        bits, magnitudes, peaks = self.total.view(torch.int32), self.level.view(torch.int32), room.bits[blocks]
        self._peaked = [
            (
                bits[at:to],
                magnitudes[at:to],
                magnitudes[at:to].view(-1, BLOCK),
                peaks[at // BLOCK : to // BLOCK],
            )
            for at, to in spans(stop - start, _CPU, reducing=True)
        ]

    def find_peaks(self) -> None:
        """The largest magnitude of each block of the totals, as bits, where the scales will be."""
        for bits, magnitudes, blocks, peaks in self._peaked:
            torch.bitwise_and(bits, _NUMBERS.magnitude, out=magnitudes)
            torch.amax(blocks, 1, out=peaks)


class _Room:
    """Memory for a piece, worked on by so many values at a time."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.alone = stride == PIECE
        """Whether this thread computes on one core: else `round_` would call on others."""
        self.total, self.level = torch.empty(PIECE), torch.empty(PIECE)
        self.bits, self.inverses = torch.empty(_BLOCKS, dtype=torch.int32), torch.empty(_BLOCKS)
        self.upper_bits = self.bits.view(torch.int16)[1::2]
        self._floats = self.bits.view(torch.float32)
        self.parts = [_Part(self, start, start + stride) for start in range(0, PIECE, stride)]

    def make_scales(self, inverse_levels: Tensor) -> None:
        """From peaks to scales, in place, and their inverses: the steps of block.py."""
        bits = self.bits
        torch.minimum(bits, _NUMBERS.infinity, out=bits)
        self._floats.mul_(inverse_levels)
        torch.maximum(bits, _NUMBERS.smallest, out=bits)
        bits.add_(_NUMBERS.round_up).bitwise_and_(_NUMBERS.bf16)
        torch.reciprocal(self._floats, out=self.inverses)


class _Rooms(threading.local):
    """Each thread's own."""

    room: _Room | None = None


_ROOMS = _Rooms()


def _room() -> _Room:
    _, stride = next(spans(PIECE, _CPU))
    if _ROOMS.room is None or _ROOMS.room.stride != stride:
        _ROOMS.room = _Room(stride)
    return _ROOMS.room
