"""Reduces long tensors between processes of one machine: owns how sums pass from one member to the next.

A piece of the tensors has a part for each member. All members share one buffer as long as the piece. The member
after a part's owner writes its values there, each following member adds its own, and the owner adds last. Then
every member copies the whole piece. So every byte of a tensor is read once and written once, for any number of
members. Pieces are longer than any cache: from about 20 MB on the C library copies past the caches, in half the
time, which gains more than staying within them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from potluck.dist import reduction
from potluck.dist.copy_threads import CopyThreads
from potluck.dist.rings import Ring, Wait

PART_ALIGN = 64


class Chain:
    """One member's view of the shared buffer and of the turns.

    In turn s, from 0, member r works on part r - 1 - s of a piece, and so on its own part in the last turn. In one
    more turn it copies the result.
    """

    def __init__(self, rank: int, size: int, turns: Ring, place: Tensor) -> None:
        """`turns`: a ring without slots, whose rounds count every member's turns; `place`: [bytes]."""
        self._rank, self._size = rank, size
        self._others = [member for member in range(size) if member != rank]
        self._before = [(rank - 1) % size]
        self._turns, self._place = turns, place

    def all_reduce(
        self, values: Tensor, op: Any, threads: CopyThreads, wait: Wait, agree: Callable[[], None]
    ) -> None:
        """`values` [n > 0], in place. `agree` is called once, before others' data is read."""
        turns = self._turns
        # Two values are rounded once, in any order and width; more need wider sums.
        simple = self._size == 2 and reduction.name_of(op) != "AVG"
        shared = self._place.view(values.dtype if simple else reduction.working_dtype(op, values.dtype))
        count = -(-values.numel() // shared.numel())
        # Of equal length, so that none is too short to be copied past the caches.
        width = -(-values.numel() // count // PART_ALIGN) * PART_ALIGN
        for k, piece in enumerate(values.split(width)):
            turns.arrived(self._others, turns.round - 1, wait)  # all have copied the piece before
            threads.copy(*self._at(0, shared, piece))
            turns.post(self._rank)
            if k == 0:
                agree()
            for turn in range(1, self._size):
                turns.arrived(self._before, turns.round - 1, wait)
                place, mine = self._at(turn, shared, piece)
                threads.accumulate(op, place, mine)
                if turn == self._size - 1:
                    threads.finish(op, place, self._size)
                turns.post(self._rank)
            turns.arrived(self._others, turns.round - 1, wait)
            threads.copy(piece, shared[: piece.numel()])
            turns.post(self._rank)

    def _at(self, turn: int, shared: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
        """This member's part in a turn: in the shared buffer, and its own values."""
        start, stop = part_of(piece.numel(), (self._rank - 1 - turn) % self._size, self._size)
        return shared[start:stop], piece[start:stop]


def part_of(length: int, member: int, size: int) -> tuple[int, int]:
    """The elements of a piece that a member reduces; whole cache lines, so the last may have fewer or none."""
    each = -(-length // size // PART_ALIGN) * PART_ALIGN if length > size * PART_ALIGN else -(-length // size)
    return min(length, member * each), min(length, (member + 1) * each)
