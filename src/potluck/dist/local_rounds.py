"""What all local collectives have in common: owns the order of rounds, the comparison of notes, the end of waits.

It must not know what a round is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.local_hands import Hands, number_of
from potluck.dist.local_memory import GroupMemory
from potluck.dist.profiled import RUNNING
from potluck.dist.rings import Patience
from potluck.errors import CollectiveError, CollectiveTimeoutError, RankGoneError
from potluck.limits import usable_cores

NOTE_LIMIT = 400
SEPARATOR = b"\0"
_ALIGN = 16
_DISAGREE = "the ranks are not doing the same thing"
_AGREE = "every rank must call the same collectives in the same order, with the same sizes and types"


class LocalCall:
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


@dataclass(slots=True)
class PieceStage:
    """One of the things that every piece goes through, piece after piece."""

    ready: Callable[[], bool]
    """Whether the next piece can be done now."""
    wait: Callable[[int], object]
    """Until the next piece can be done."""
    do: Callable[[int], None]
    count: int = 0
    """Pieces done."""


def run_stages(stages: Sequence[PieceStage], count: int) -> None:
    """Take `count` pieces through all stages, each piece as far as it can go before the next one is begun.

    So a piece is still in the cache when it is needed again; and where another process is slow or not running, this
    one goes ahead as far as there are free slots instead of waiting for it.
    """
    last = stages[-1]
    while last.count < count:
        furthest = None
        for at in range(len(stages) - 1, -1, -1):
            stage = stages[at]
            if stage.count >= (stages[at - 1].count if at else count):
                continue
            furthest = furthest or stage
            if stage.ready():
                break
        else:
            assert furthest is not None
            stage = furthest
            stage.wait(stage.count)
        stage.do(stage.count)
        stage.count += 1


class Rounds:
    """The members of a local group as they go through rounds together."""

    def __init__(
        self,
        memory: GroupMemory,
        names: Sequence[str] | None = None,
        hands: Hands | None = None,
    ) -> None:
        """`hands`: who copies and adds up what is long; None: as many as there are cores for each member."""
        self.rank, self.size = memory.rank, memory.size
        self.names = list(names) if names is not None else [f"rank {number}" for number in range(self.size)]
        self._memory = memory
        self._pieces, self._results = memory.pieces, memory.results
        self._others = [number for number in range(self.size) if number != self.rank]
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._broken = ""
        self._hands = hands or Hands(number_of(0, usable_cores(), self.size))

    def abort(self, reason: str) -> None:
        """End every wait of every member within moments; `reason` is what they are told. From any thread."""
        self._broken = self._broken or reason
        self._memory.tell(f"{self.names[self.rank]} gave up: {reason}")

    def close(self) -> None:
        """Leave. Members who still wait for this one are told that it has left."""
        self._broken = self._broken or "it is closed"
        self._scratch.clear()
        self._hands.close()
        self._memory.close()

    def _run(
        self,
        call: LocalCall,
        note: bytes,
        count: int,
        fill: Callable[[int, int], None],
        drain: Callable[[int, int], None],
        writers: Sequence[int] | None = None,
    ) -> None:
        """`count` rounds; the next ones are filled while others still read the ones before.

        `fill` and `drain` get the piece's index and the round's number. After the first round, in which everybody
        waits for everybody and compares notes, this member waits for `writers` only (None: all others).
        """
        ring, rank = self._pieces, self.rank
        with call as patience:
            if count == 1:  # what is small is so often that it goes the straight way
                number = ring.free(self._others, patience)
                fill(0, number)
                ring.write_note(rank, number, note)
                ring.post(rank)
                self._compare(number, note, patience)
                drain(0, number)
                ring.done(rank)
                return
            filling = self._filling(note, fill, patience)
            run_stages((filling, self._draining(note, drain, patience, writers)), count)

    def _filling(self, note: bytes, fill: Callable[[int, int], None], patience: Patience) -> PieceStage:
        """Put pieces into slots, as far ahead as there are free ones."""
        ring = self._pieces

        def do(k: int) -> None:
            fill(k, ring.round)
            if k == 0:
                ring.write_note(self.rank, ring.round, note)
            ring.post(self.rank)

        return PieceStage(
            ready=lambda: ring.is_free(self._others), wait=lambda k: ring.free(self._others, patience), do=do
        )

    def _draining(
        self,
        note: bytes,
        drain: Callable[[int, int], None],
        patience: Patience,
        writers: Sequence[int] | None = None,
    ) -> PieceStage:
        """Read the others' slots as they come."""
        ring = self._pieces
        needed = self._others if writers is None else writers

        def wait(k: int) -> None:
            if k == 0:
                self._compare(ring.read_round, note, patience)
            else:
                ring.arrived(needed, ring.read_round, patience)

        def do(k: int) -> None:
            if k == 0:
                wait(0)
            drain(k, ring.read_round)
            ring.done(self.rank)

        return PieceStage(ready=lambda: ring.has(needed, ring.read_round), wait=wait, do=do)

    def _compare(self, number: int, note: bytes, patience: Patience) -> None:
        """Wait for everybody's first round, and see that all are doing the same."""
        ring = self._pieces
        ring.arrived(self._others, number, patience)
        if RUNNING.ranges is not None:
            RUNNING.ranges.met()
        if all(ring.note_is(other, number, note) for other in self._others):
            return
        found = {other: ring.note(other, number).partition(SEPARATOR)[0] for other in self._others}
        mine = note.partition(SEPARATOR)[0]
        if any(theirs != mine for theirs in found.values()):
            notes = sorted({**found, self.rank: mine}.items())
            told = "; ".join(f"{self.names[member]}: {text.decode(errors='replace')}" for member, text in notes)
            raise CollectiveError(f"{_DISAGREE}: {told}", hint=_AGREE)

    def _put(self, number: int, piece: Tensor, at: int = 0) -> None:
        """Copy a piece into this member's slot of a round."""
        self._hands.copy(self._pieces.slot(self.rank, number, piece.dtype)[at : at + piece.numel()], piece)

    def _see(self, member: int, number: int, like: Tensor, at: int = 0) -> Tensor:
        """What a member has put into its slot, as long as `like` and of its type; to be read, not to be kept."""
        return self._pieces.slot(member, number, like.dtype)[at : at + like.numel()]

    def _begin(self, timeout_s: float) -> LocalCall:
        if self._broken:
            raise RankGoneError(f"this group of processes is of no use any more: {self._broken}")
        deadline = time.monotonic() + timeout_s
        return LocalCall(self, Patience(deadline, self._check, lambda late: self._late(late, timeout_s)))

    def _check(self, missing: Callable[[], list[int]]) -> None:
        told = self._memory.told()
        if told:
            text = f"a collective between processes of one machine ended early: {told}"
            # Whoever hears of a disagreement from another is told as if it had seen it itself.
            raise CollectiveError(text, hint=_AGREE) if _DISAGREE in told else RankGoneError(text)
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
            f"{names} did not come within {round(timeout_s, 2):g} s",
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
