"""Reductions of long tensors between processes of one machine; owns how sums pass from one member to the next.

It must not know how the members have met, nor how they agree on what to reduce.

A piece of the tensors has a part for each member, and one place in shared memory, as long as the piece, for all of
them. The member after a part's owner puts its values there, each following one adds its own, the owner comes last;
then everybody takes the whole piece. So every byte of a tensor is read once and written once, however many they
are. Pieces are long although no cache holds them: from some twenty megabytes on the C library copies past the
caches, in half the time, which is more than can be gained by staying within them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from potluck.dist import reduction
from potluck.dist.local_hands import Hands
from potluck.dist.rings import Patience, Ring

PART_ALIGN = 64


class Chain:
    """One member's view of the place and of the turns.

    In its turn s, from 0 on, member r is at part r - 1 - s of a piece; so in the last one it is at its own. One
    turn more is to take the result.
    """

    def __init__(self, rank: int, size: int, turns: Ring, place: Tensor) -> None:
        """`turns`: a ring without slots, whose rounds count every member's turns; `place`: [bytes]."""
        self._rank, self._size = rank, size
        self._others = [member for member in range(size) if member != rank]
        self._before = [(rank - 1) % size]
        self._turns, self._place = turns, place

    def all_reduce(
        self, values: Tensor, op: Any, hands: Hands, patience: Patience, agree: Callable[[], None]
    ) -> None:
        """`values` [n > 0], in place. `agree` is called once, before anything is read that others have written."""
        turns = self._turns
        # Two values are rounded once, in whatever order and width; more need wider sums.
        simple = self._size == 2 and reduction.name_of(op) != "AVG"
        shared = self._place.view(values.dtype if simple else reduction.working_dtype(op, values.dtype))
        count = -(-values.numel() // shared.numel())
        # As long as each other, so that none is too short to be copied past the caches.
        width = -(-values.numel() // count // PART_ALIGN) * PART_ALIGN
        for k, piece in enumerate(values.split(width)):
            turns.arrived(self._others, turns.round - 1, patience)  # all have taken the piece before
            hands.copy(*self._at(0, shared, piece))
            turns.post(self._rank)
            if k == 0:
                agree()
            for turn in range(1, self._size):
                turns.arrived(self._before, turns.round - 1, patience)
                place, mine = self._at(turn, shared, piece)
                hands.accumulate(op, place, mine)
                if turn == self._size - 1:
                    hands.finish(op, place, self._size)
                turns.post(self._rank)
            turns.arrived(self._others, turns.round - 1, patience)
            hands.copy(piece, shared[: piece.numel()])
            turns.post(self._rank)

    def _at(self, turn: int, shared: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Where this member is in a turn: the part in the common place, and its own values of it."""
        start, stop = part_of(piece.numel(), (self._rank - 1 - turn) % self._size, self._size)
        return shared[start:stop], piece[start:stop]


def part_of(length: int, member: int, size: int) -> tuple[int, int]:
    """Which elements of a piece a member reduces; whole cache lines, so the last may have fewer or none."""
    each = -(-length // size // PART_ALIGN) * PART_ALIGN if length > size * PART_ALIGN else -(-length // size)
    return min(length, member * each), min(length, (member + 1) * each)
