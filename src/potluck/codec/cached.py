"""Encodes and sums on a CPU in the fewest passes over memory, with buffers that stay in a core's cache.

The payloads have the same bits as those of the codecs.

Two ranks exchange pieces of 65,536 values. A piece goes through about ten operations while it is in the cache.
Making a view costs a tenth of such an operation, and a plain number, which each operation converts to a tensor,
costs even more. So views are made for many pieces together, and numbers only once. The scales of several pieces are
computed together. Sums are stored in the memory of the residuals, because any other place would evict something
from the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from potluck.balance.codecs import BLOCK
from potluck.codec.block import BF16, INFINITY, NO_FRACTION, ROUND_UP, SMALLEST, BlockCodec
from potluck.codec.interface import Codec
from potluck.codec.tensors import MAGNITUDE, checked_payload, spans

PIECE = 65_536
"""Values per piece: that many sums, their levels, and the input and output fit into a core's own cache (1.25
MiB)."""

_GROUP = 8
"""Pieces whose scales are computed together. Two or four, whose sums would all stay in the cache, are no faster."""

_BLOCKS = PIECE // BLOCK
_SCALES = 2 * _BLOCKS  # bytes
_CPU = torch.device("cpu")


def in_blocks(codec: Codec) -> TypeGuard[BlockCodec]:
    """Whether the codec packs in blocks, as this module does."""
    return isinstance(codec, BlockCodec)


class Packing:
    """A tensor of whole pieces that is packed, and then replaced by the sum of its own and another's decoded
    payloads: some pieces at a time, by one thread. Each piece has its own payload, and the payloads are
    consecutive."""

    def __init__(self, codec: BlockCodec, values: Tensor, residual: Tensor | None, packed: Tensor) -> None:
        """
        Args:
            values: [pieces * PIECE] float32, float16 or bfloat16, contiguous, in host memory.
            residual: [pieces * PIECE] float32; None: nothing is kept.
            packed: [pieces * codec.nbytes(PIECE)] uint8, contiguous, at an even address.
        """
        room = self._room = _room()
        self._codec, self._per_piece, self._bytes = codec, PIECE // room.stride, codec.nbytes(PIECE)
        self._direct = values.dtype == torch.float32
        self._given, self._results = _parts(values, room.stride)
        self._kept = None if residual is None else _Sums(residual, room.stride)
        self._stored, self._codes = _views(codec, packed, room.stride)
        self._floats = torch.empty(self._stored.shape)
        self._scales = self._floats.view(-1, room.stride // BLOCK, 1).unbind(0)

    def encode(self, first: int, last: int) -> None:
        """Pack these pieces of `values + residual`, and store the rounding errors in `residual`, like
        `encode_with_feedback`. The values do not change. The residual of a piece that is not finite does not change
        either, except for a rounding, and becomes zero where a value is not finite."""
        for start in range(first, last, _GROUP):
            self._encode(start, min(start + _GROUP, last))

    def _encode(self, first: int, last: int) -> None:
        room, codec, given, kept = self._room, self._codec, self._given, self._kept
        start, stop = first * self._per_piece, last * self._per_piece
        sums, base = (room.sums, start) if kept is None else (kept, 0)
        for part, at in enumerate(range(start, stop)):
            total = sums.flat[at - base]
            if kept is None:
                total.copy_(given[at])
            else:
                torch.add(given[at], total, out=total)
            room.find_peaks(part, sums.bits[at - base])
        scales = room.make_scales(last - first, _NUMBERS.inverse_levels[codec.levels])
        stored = self._stored[first:last].copy_(scales.upper_bits)
        self._floats[first:last].copy_(scales.floats)
        finite = kept is None or int(stored.amax()) < codec.limit
        for part, at in enumerate(range(start, stop)):
            totals = sums.blocks[at - base]
            torch.mul(totals, room.inverses[part], out=room.levels)
            if room.alone:
                room.level.round_()
            else:
                room.level.add_(_NUMBERS.no_fraction).sub_(_NUMBERS.no_fraction)
            codec.pack(room.levels, self._codes[at])
            if kept is None:
                continue
            if finite or int(stored[part // self._per_piece].amax()) < codec.limit:
                # The product is exact, and so the difference has one rounding, as in two steps.
                torch.addcmul(totals, room.levels, room.scales[part], value=-1, out=totals)
            else:
                kept.flat[at].sub_(given[at]).nan_to_num_(0.0, 0.0, 0.0)

    def add(self, first: int, last: int, theirs: Tensor, *, divide_by: int = 1) -> None:
        """Replace these pieces of the values by their own and another's payloads, decoded, added and divided.

        Raises WireError if theirs are not payloads of this codec for this many pieces.
        """
        room, codec, count = self._room, self._codec, (last - first) * PIECE
        whole = checked_payload(theirs, count, (last - first) * self._bytes, codec.name)
        stored, codes = _views(codec, whole.clone() if whole.data_ptr() % 2 else whole, room.stride)
        widened = stored.to(torch.int32).bitwise_left_shift_(_NUMBERS.half).view(torch.float32)
        scales = widened.view(-1, room.stride // BLOCK, 1).unbind(0)
        for at, (found, scale) in enumerate(zip(codes, scales, strict=True), first * self._per_piece):
            into = self._results[at]
            total = into if self._direct else room.sums.blocks[0]
            codec.widen(self._codes[at], room.levels)
            torch.mul(room.levels, self._scales[at], out=total)
            codec.widen(found, room.levels)
            # Products are exact, so the sum has one rounding, whichever of the two is multiplied here.
            torch.addcmul(total, room.levels, scale, out=total)
            if divide_by > 1:
                total.div_(divide_by)
            if not self._direct:
                into.copy_(total)


def _parts(tensor: Tensor, stride: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Views of each piece as [stride] and as [blocks, BLOCK]."""
    flat = tensor.detach()
    return flat.view(-1, stride).unbind(0), flat.view(-1, stride // BLOCK, BLOCK).unbind(0)


def _views(codec: BlockCodec, packed: Tensor, stride: int) -> tuple[Tensor, Sequence[Tensor]]:
    """The scales of all pieces, [pieces, _BLOCKS] int16, and the codes, [n] int8 for every `stride` values."""
    pieces = packed.view(-1, codec.nbytes(PIECE))
    stored, codes = pieces[:, :_SCALES].view(torch.int16), pieces[:, _SCALES:].view(torch.int8)
    if stride == PIECE:
        return stored, codes.unbind(0)
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


class _Sums:
    """Views of memory for sums, [pieces * PIECE] float32: as [stride] each, in blocks, and as bits."""

    __slots__ = ("bits", "blocks", "flat")

    def __init__(self, memory: Tensor, stride: int) -> None:
        self.flat, self.blocks = _parts(memory, stride)
        self.bits = memory.detach().view(torch.int32).view(-1, stride).unbind(0)


class _Scales:
    """Views of a room's scales for this many pieces: as floats, as their bits, and as those that are sent."""

    __slots__ = ("bits", "floats", "inverses", "upper_bits")

    def __init__(self, bits: Tensor, inverses: Tensor) -> None:
        self.bits, self.floats, self.inverses = bits, bits.view(torch.float32), inverses
        self.upper_bits = bits.view(torch.int16)[:, 1::2]


class _PieceRoom:
    """Memory for the levels of one part of a piece, and for the scales of a group of pieces."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.alone = stride == PIECE
        """Whether this thread computes on one core; otherwise `round_` would use others."""
        self.level = torch.empty(stride)
        self.levels = self.level.view(-1, BLOCK)
        self._magnitude = self.level.view(torch.int32)
        self._magnitudes = self._magnitude.view(-1, BLOCK)
        bits, inverses = torch.empty(_GROUP, _BLOCKS, dtype=torch.int32), torch.empty(_GROUP, _BLOCKS)
        self._groups = [_Scales(bits[:pieces], inverses[:pieces]) for pieces in range(_GROUP + 1)]
        blocks = stride // BLOCK
        self._peaks = bits.view(-1, blocks).unbind(0)
        self.scales = bits.view(torch.float32).view(-1, blocks, 1).unbind(0)
        self.inverses = inverses.view(-1, blocks, 1).unbind(0)
        self._sums: _Sums | None = None

    @property
    def sums(self) -> _Sums:
        """Sums of a group, used if no residual is kept or the results have another type."""
        if self._sums is None:
            self._sums = _Sums(torch.empty(_GROUP * PIECE), self.stride)
        return self._sums

    def find_peaks(self, part: int, bits: Tensor) -> None:
        """Write the largest magnitude of each block of a group's part, as bits, to the place of its scales."""
        torch.bitwise_and(bits, _NUMBERS.magnitude, out=self._magnitude)
        torch.amax(self._magnitudes, 1, out=self._peaks[part])

    def make_scales(self, pieces: int, inverse_levels: Tensor) -> _Scales:
        """Turn peaks into scales, in place, and compute their inverses, as in block.py."""
        group = self._groups[pieces]
        torch.minimum(group.bits, _NUMBERS.infinity, out=group.bits)
        group.floats.mul_(inverse_levels)
        torch.maximum(group.bits, _NUMBERS.smallest, out=group.bits)
        group.bits.add_(_NUMBERS.round_up).bitwise_and_(_NUMBERS.bf16)
        torch.reciprocal(group.floats, out=group.inverses)
        return group


class _Rooms(threading.local):
    """Buffers of each thread."""

    room: _PieceRoom | None = None


_ROOMS = _Rooms()


def _room() -> _PieceRoom:
    _, stride = next(spans(PIECE, _CPU, reducing=True))
    if _ROOMS.room is None or _ROOMS.room.stride != stride:
        _ROOMS.room = _PieceRoom(stride)
    return _ROOMS.room
