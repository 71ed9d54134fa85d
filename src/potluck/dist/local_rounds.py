"""What all local collectives have in common: owns the order of rounds, the comparison of notes, the end of waits.

It must not know what a round is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.local_memory import Memory
from potluck.dist.rings import Patience
from potluck.errors import CollectiveError, CollectiveTimeoutError, RankGoneError

NOTE_LIMIT = 400
SEPARATOR = b"\0"
_ALIGN = 16


class Call:
    """One collective: within it waits have a deadline, and an error ends the group for all its members."""

    __slots__ = ("_rounds", "patience")

    def __init__(self, rounds: Rounds, patience: Patience) -> None:
        self._rounds = rounds
        self.patience = patience

    def __enter__(self) -> Patience:
        return self.patience

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._rounds.abort(str(error) or type(error).__name__)


class Rounds:
    """The members of a local group as they go through rounds together."""

    def __init__(self, memory: Memory, names: Sequence[str] | None) -> None:
        self.rank, self.size = memory.rank, memory.size
        self.names = list(names) if names is not None else [f"rank {number}" for number in range(self.size)]
        self._memory = memory
        self._pieces, self._results = memory.pieces, memory.results
        self._others = [number for number in range(self.size) if number != self.rank]
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._broken = ""

    def abort(self, reason: str) -> None:
        """End every wait of every member within moments; `reason` is what they are told. From any thread."""
        self._broken = self._broken or reason
        self._memory.tell(f"{self.names[self.rank]} gave up: {reason}")

    def close(self) -> None:
        """Leave. Members who still wait for this one are told that it has left."""
        self._broken = self._broken or "it is closed"
        self._scratch.clear()
        self._memory.close()

    def _run(
        self,
        call: Call,
        note: bytes,
        count: int,
        fill: Callable[[int, int], None],
        drain: Callable[[int, int], None],
        writers: Sequence[int] | None = None,
    ) -> None:
        """`count` rounds, each filled while the one before is still being read by others.

        `fill` and `drain` get the piece's index and the round's number. After the first round, in which everybody
        waits for everybody and compares notes, this member waits for `writers` only (None: all others).
        """
        ring, rank, others = self._pieces, self.rank, self._others
        writers = others if writers is None else writers
        with call as patience:
            for k in range(count + 1):
                if k < count:
                    number = ring.free(others, patience)
                    fill(k, number)
                    if k == 0:
                        ring.write_note(rank, number, note)
                    ring.post(rank)
                    if count == 1:
                        self._compare(number, note, patience)
                        drain(0, number)
                        ring.done(rank)
                        return
                if k:
                    number = ring.read_round
                    if k == 1:
                        self._compare(number, note, patience)
                    else:
                        ring.arrived(writers, number, patience)
                    drain(k - 1, number)
                    ring.done(rank)

    def _compare(self, number: int, note: bytes, patience: Patience) -> None:
        """Wait for everybody's first round, and see that all are doing the same."""
        ring = self._pieces
        ring.arrived(self._others, number, patience)
        found = {other: ring.note(other, number).partition(SEPARATOR)[0] for other in self._others}
        mine = note.partition(SEPARATOR)[0]
        if any(theirs != mine for theirs in found.values()):
            found[self.rank] = mine
            told = "; ".join(f"{self.names[m]}: {found[m].decode(errors='replace')}" for m in sorted(found))
            raise CollectiveError(
                f"the ranks are not doing the same thing: {told}",
                hint="every rank must call the same collectives in the same order, with the same sizes and types",
            )

    def _put(self, number: int, piece: Tensor, at: int = 0) -> None:
        """Copy a piece into this member's slot of a round."""
        self._pieces.slot(self.rank, number, piece.dtype)[at : at + piece.numel()].copy_(piece)

    def _see(self, member: int, number: int, like: Tensor, at: int = 0) -> Tensor:
        """What a member has put into its slot, as long as `like` and of its type; to be read, not to be kept."""
        return self._pieces.slot(member, number, like.dtype)[at : at + like.numel()]

    def _begin(self, timeout_s: float) -> Call:
        if self._broken:
            raise RankGoneError(f"this group of processes is of no use any more: {self._broken}")
        return Call(self, self._waiting(timeout_s))

    def _waiting(self, timeout_s: float) -> Patience:
        return Patience(time.monotonic() + timeout_s, self._check, lambda late: self._late(late, timeout_s))

    def _check(self, missing: Callable[[], list[int]]) -> None:
        told = self._memory.told()
        if told:
            raise RankGoneError(f"a collective between processes of one machine ended early: {told}")
        if self._broken:
            raise RankGoneError(f"the wait for other processes was ended: {self._broken}")
        lost = self._memory.gone() | self._memory.left()
        # Asked after: one that has done its part and left is not missed.
        if lost and (absent := lost.intersection(missing())):
            dead = ", ".join(self.names[member] for member in sorted(absent))
            raise RankGoneError(
                f"{dead} ended while others were waiting for it",
                hint="the first failure is in that process's own output",
            )

    def _late(self, late: Iterable[int], timeout_s: float) -> Exception:
        names = ", ".join(self.names[member] for member in late)
        return CollectiveTimeoutError(
            f"{names} did not come within {timeout_s:g} s",
            hint="it may be stuck, or be in another collective; look at its own output",
        )

    def _width(self, dtype: torch.dtype, parts: int = 1) -> int:
        """Elements of a piece, where a slot has so many parts."""
        return self._memory.sizes.slot_bytes // dtype.itemsize // parts // _ALIGN * _ALIGN

    def _cut(self, values: Tensor, parts: int = 1) -> tuple[int, int]:
        """Elements of a piece, and how many pieces it takes: at least one, so that members always meet."""
        width = self._width(values.dtype, parts)
        return width, max(1, -(-values.numel() // width))

    def _total(self, op: Any, place: Tensor) -> Tensor:
        """Where to add up what will be put to `place`: there, or in wider numbers elsewhere."""
        wide = reduction.working_dtype(op, place.dtype)
        if wide == place.dtype:
            return place
        scratch = self._scratch.get(wide)
        if scratch is None or scratch.numel() < place.numel():
            scratch = self._scratch[wide] = torch.empty(max(place.numel(), 4096), dtype=wide)
        return scratch[: place.numel()]

    def _fits(self, name: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise CollectiveError(
                f"{name}: a tensor has {found} elements where {wanted} are needed",
                hint="the long side holds one part for each rank",
            )


def note_of(name: str, values: Tensor, op: Any = None, root: int | None = None) -> bytes:
    """What a member is doing, for the others to compare."""
    words = [name, f"{values.numel()} x {values.dtype}"]
    if op is not None:
        words.append(reduction.name_of(op))
    if root is not None:
        words.append(f"root {root}")
    return " ".join(words).encode()
