"""Packing and adding up on a CPU in the fewest passes: owns the rooms for it, which stay in a core's cache.

It must not know who sends the payloads, and changes nothing about them: the bits are those of the codecs.

What two ranks send each other is packed in pieces of 65,536 values. A piece goes through some ten operations while
it is in the cache. A view costs as much as a tenth of such an operation, and a plain number, which is made into a
tensor in each of them, even more: views are made for many pieces at once, and numbers once for all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from potluck.codec.block import BF16, BLOCK, INFINITY, NO_FRACTION, ROUND_UP, SMALLEST, BlockCodec
from potluck.codec.interface import Codec
from potluck.codec.tensors import MAGNITUDE, checked_payload, spans

PIECE = 65_536
"""Values: two rooms of that many, and what is read and written, fit a core's own cache (1.25 MiB)."""

_BLOCKS = PIECE // BLOCK
_SCALES = 2 * _BLOCKS  # bytes
_CPU = torch.device("cpu")


def in_blocks(codec: Codec) -> TypeGuard[BlockCodec]:
    """Whether it packs in blocks, as is done here."""
    return isinstance(codec, BlockCodec)


class Packing:
    """A tensor of whole pieces that is packed, and then becomes the sum of what its own and another's payloads
    decode to: some pieces at a time, by one thread. Each piece has a payload of its own, one behind the other."""

    def __init__(self, codec: BlockCodec, values: Tensor, residual: Tensor | None, packed: Tensor) -> None:
        """
        Args:
            values: [pieces * PIECE] float32, float16 or bfloat16, contiguous, in host memory.
            residual: [pieces * PIECE] float32; None: nothing is kept.
            packed: [pieces * codec.nbytes(PIECE)] uint8, contiguous, at an even address.
        """
        room = self._room = _room()
        self._codec, self._per_piece, self._bytes = codec, len(room.parts), codec.nbytes(PIECE)
        self._direct = values.dtype == torch.float32
        self._given, self._results = _parts(values, room.stride)
        self._kept: Sequence[Tensor] | None = None
        self._kept_blocks: Sequence[Tensor] | None = None
        if residual is not None:
            self._kept, self._kept_blocks = _parts(residual, room.stride)
        stored, self._codes = _views(codec, packed, room.stride)
        self._stored = stored.unbind(0)
        scales = torch.empty(len(self._stored), _BLOCKS)
        self._scales = scales.view(-1, room.stride // BLOCK, 1).unbind(0)
        self._rows = scales.unbind(0)

    def encode(self, first: int, last: int) -> None:
        """Pack these pieces of `values + residual`, and leave in `residual` what the payloads lost of it, as
        `encode_with_feedback`. The values stay."""
        room, codec, given, kept = self._room, self._codec, self._given, self._kept
        inverse_levels = _NUMBERS.inverse_levels[codec.levels]
        for piece in range(first, last):
            start = piece * self._per_piece
            for at, part in enumerate(room.parts, start):
                if kept is None:
                    part.total.copy_(given[at])
                else:
                    torch.add(given[at], kept[at], out=part.total)
                part.find_peaks()
            room.make_scales(inverse_levels)
            scales = self._stored[piece].copy_(room.upper_bits)
            self._rows[piece].copy_(room.floats)
            keeps = self._kept_blocks if int(scales.amax()) < codec.limit else None
            for at, part in enumerate(room.parts, start):
                torch.mul(part.totals, part.inverses, out=part.levels)
                if room.alone:
                    part.level.round_()
                else:
                    part.level.add_(_NUMBERS.no_fraction).sub_(_NUMBERS.no_fraction)
                codec.pack(part.levels, self._codes[at])
                if keeps is not None:
                    # The product is exact, and so the difference has one rounding, as in two steps.
                    torch.addcmul(part.totals, part.levels, part.scales, value=-1, out=keeps[at])

    def add(self, first: int, last: int, theirs: Tensor, *, divide_by: int = 1) -> None:
        """Write over these pieces of the values: what was packed of them and what another packed, decoded, added
        and divided.

        Raises:
            WireError: theirs are no payloads of this codec and of so many pieces.
        """
        room, codec, count = self._room, self._codec, (last - first) * PIECE
        whole = checked_payload(theirs, count, (last - first) * self._bytes, codec.name)
        stored, codes = _views(codec, whole.clone() if whole.data_ptr() % 2 else whole, room.stride)
        widened = stored.to(torch.int32).bitwise_left_shift_(_NUMBERS.half).view(torch.float32)
        scales = widened.view(-1, room.stride // BLOCK, 1).unbind(0)
        start = first * self._per_piece
        for number, (found, scale) in enumerate(zip(codes, scales, strict=True)):
            at, part = start + number, room.parts[number % self._per_piece]
            codec.unpack(self._codes[at], self._scales[at], part.totals)
            codec.widen(found, part.levels)
            # Products are exact, so the sum has one rounding, whichever of the two is multiplied here.
            into = self._results[at]
            total = torch.addcmul(part.totals, part.levels, scale, out=into if self._direct else part.totals)
            if divide_by > 1:
                total.div_(divide_by)
            if not self._direct:
                into.copy_(total)


def _parts(tensor: Tensor, stride: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """As [stride] each, and as [blocks, BLOCK] each."""
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
        self.floats = self.bits.view(torch.float32)
        self.parts = [_Part(self, start, start + stride) for start in range(0, PIECE, stride)]

    def make_scales(self, inverse_levels: Tensor) -> None:
        """From peaks to scales, in place, and their inverses: the steps of block.py."""
        bits = self.bits
        torch.minimum(bits, _NUMBERS.infinity, out=bits)
        self.floats.mul_(inverse_levels)
        torch.maximum(bits, _NUMBERS.smallest, out=bits)
        bits.add_(_NUMBERS.round_up).bitwise_and_(_NUMBERS.bf16)
        torch.reciprocal(self.floats, out=self.inverses)


class _Rooms(threading.local):
    """Each thread's own."""

    room: _Room | None = None


_ROOMS = _Rooms()


def _room() -> _Room:
    _, stride = next(spans(PIECE, _CPU))
    if _ROOMS.room is None or _ROOMS.room.stride != stride:
        _ROOMS.room = _Room(stride)
    return _ROOMS.room
