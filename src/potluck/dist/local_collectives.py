"""Collectives between processes of one machine through shared memory: owns how a tensor's pieces pass through it.

Every process copies a piece of its tensor into its own slot, reads the others' slots in place with torch's
operations, and continues with the next piece while the others still read. Only long reductions use another way
(local_chain.py). No process maps another's tensor, so its owner may free it after the call has returned or failed.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.copy_threads import CopyThreads, number_of
from potluck.dist.counting import SPENT
from potluck.dist.local_chain import part_of
from potluck.dist.local_memory import GroupMemory, Sizes
from potluck.dist.profiled import RUNNING
from potluck.dist.record import Call
from potluck.dist.reduction import Op
from potluck.dist.rings import Wait
from potluck.errors import CollectiveError, CollectiveTimeoutError, RankGoneError
from potluck.limits import usable_cores

SUM = dist.ReduceOp.SUM
_PLAIN = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Types that are added without conversion."""
_COUNT = struct.Struct("<q")
NOTE_LIMIT = 400
_SEPARATOR = b"\0"
_ALIGN = 16
_DISAGREE = "the ranks called different collectives"
_AGREE = "every rank must call the same collectives in the same order, with the same sizes and types"

Slice = Callable[[int, int], None]
"""Fills or reads a slot; gets the index of the piece and the number of the round."""


class _Guard:
    """The context of one collective: an error in it ends the group for all members."""

    __slots__ = ("_group", "_wait")

    def __init__(self, group: LocalGroup, wait: Wait) -> None:
        self._group, self._wait = group, wait

    def __enter__(self) -> Wait:
        return self._wait

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._group.abort(str(error) or type(error).__name__)


class LocalGroup:
    """`size` processes of one machine, which call the same collectives in the same order; see `Collectives`.

    One thread at a time may run collectives. If the calls of two members differ, all members raise a
    CollectiveError that names both. After any error the group is unusable.
    """

    def __init__(
        self, memory: GroupMemory, names: Sequence[str] | None = None, threads: CopyThreads | None = None
    ) -> None:
        """`threads`: copy and reduce long tensors; None: as many as there are cores for each member."""
        self.rank, self.size = memory.rank, memory.size
        self.names = list(names) if names is not None else [f"rank {number}" for number in range(self.size)]
        self._memory = memory
        self._pieces, self._results = memory.pieces, memory.results
        self._others = [number for number in range(self.size) if number != self.rank]
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._broken = ""
        self._threads = threads or CopyThreads(number_of(0, usable_cores(), self.size))

    @classmethod
    def create(
        cls,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        *,
        names: Sequence[str] | None = None,
        copy_threads: int = 0,
        timeout_s: float = 60.0,
    ) -> LocalGroup:
        """Meet the other members through torch's `store`; every member raises if one of them cannot attach."""
        memory = GroupMemory.meet(store, prefix, rank, size, sizes=Sizes(), timeout_s=timeout_s)
        return cls(memory, names, threads=CopyThreads(number_of(copy_threads, usable_cores(), size)))

    def abort(self, reason: str) -> None:
        """End every wait of every member within moments, with this reason. From any thread."""
        self._broken = self._broken or reason
        self._memory.tell(f"{self.names[self.rank]} gave up: {reason}")

    def close(self) -> None:
        """Leave. Members that still wait for this one raise."""
        self._broken = self._broken or "it is closed"
        self._scratch.clear()
        self._threads.close()
        self._memory.close()

    # -- reductions -----------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None:
        """In place; every member gets the same bits."""
        sizes = self._memory.sizes
        long = min(sizes.part_bytes * self.size, sizes.slot_bytes)
        small = long if self.size == 2 else min(long, sizes.small_bytes)
        if reduction.name_of(op) == "SUM" and flat.dtype in _PLAIN and flat.nbytes <= small:
            self._sum_small(call, flat)
            return
        wide, op = _multiplied(flat, op)
        if wide.nbytes > long:
            self._reduce_along(call, wide, op)
        elif wide.nbytes <= small:
            self._reduce_everywhere(call, wide, op)
        else:
            self._reduce_in_parts(call, wide, op)
        if wide is not flat:
            flat.copy_(wide)

    def _sum_small(self, call: Call, values: Tensor) -> None:
        """The same as `_reduce_everywhere` with fewer calls, because every microsecond counts here."""
        ring, rank, dtype, count = self._pieces, self.rank, values.dtype, values.numel()
        note = call.header.about[:NOTE_LIMIT]
        with self._begin(call) as wait:
            number = ring.free(self._others, wait)
            ring.slot(rank, number, dtype)[:count].copy_(values)
            ring.write_note(rank, number, note)
            ring.post(rank)
            self._compare(number, note, wait)
            if self.size > 2:
                values.copy_(ring.slot(0, number, dtype)[:count])
            began = time.perf_counter()
            for member in range(1, self.size) if self.size > 2 else self._others:
                values.add_(ring.slot(member, number, dtype)[:count])
            SPENT.reduction += time.perf_counter() - began
            ring.done(rank)

    def _reduce_everywhere(self, call: Call, values: Tensor, op: Op) -> None:
        """Every member reads everything, in one round: best for small tensors, and for two members."""

        def drain(k: int, number: int) -> None:
            # Two values are rounded once, in any order and width. More are added in the same order by every
            # member, so that all get the same bits.
            if self.size == 2 and reduction.name_of(op) != "AVG":
                reduction.accumulate(op, values, self._see(1 - self.rank, number, values))
                return
            total = self._total(op, values)
            total.copy_(self._see(0, number, values))
            for member in range(1, self.size):
                reduction.accumulate(op, total, self._see(member, number, values))
            self._finish(op, total, values)

        self._run(call, 1, lambda k, number: self._put(number, values), drain)

    def _reduce_along(self, call: Call, values: Tensor, op: Op) -> None:
        """Pass sums from member to member: best for long tensors."""
        ring, note = self._pieces, call.header.about[:NOTE_LIMIT]
        with self._begin(call) as wait:
            number = ring.free(self._others, wait)
            ring.write_note(self.rank, number, note)
            ring.post(self.rank)

            def agree() -> None:
                self._compare(number, note, wait)
                ring.done(self.rank)

            self._memory.chain.all_reduce(values, op, self._threads, wait, agree)

    def _reduce_in_parts(self, call: Call, values: Tensor, op: Op) -> None:
        """Each member reduces a part and shares the result: fewer bytes for many members, in two rounds."""
        ring, out, rank, note = self._pieces, self._results, self.rank, call.header.about[:NOTE_LIMIT]
        start, stop = part_of(values.numel(), rank, self.size)
        mine = values[start:stop]
        with self._begin(call) as wait:
            number = ring.free(self._others, wait)
            self._put(number, values[:start])
            self._put(number, values[stop:], at=stop)
            ring.write_note(rank, number, note)
            ring.post(rank)
            self._compare(number, note, wait)
            total = self._total(op, mine)
            if total is not mine:
                total.copy_(mine)
            for member in self._others:
                reduction.accumulate(op, total, self._see(member, number, mine, at=start))
            self._finish(op, total, mine)
            ring.done(rank)
            number = out.free(self._others, wait)
            out.slot(rank, number, values.dtype)[: mine.numel()].copy_(mine)
            out.post(rank)
            for member in self._others:
                out.arrived((member,), number, wait)
                start, stop = part_of(values.numel(), member, self.size)
                values[start:stop].copy_(out.slot(member, number, values.dtype)[: stop - start])
            out.done(rank)

    def reduce(self, call: Call, flat: Tensor, op: Op, root: int) -> None:
        """Reduce in place at the root. The other tensors do not change."""
        wide, op = _multiplied(flat, op)
        width, count = self._cut(wide)
        here = self.rank == root

        def fill(k: int, number: int) -> None:
            if not here:
                self._put(number, wide[k * width : (k + 1) * width])

        def drain(k: int, number: int) -> None:
            if not here:
                return
            mine = wide[k * width : (k + 1) * width]
            total = self._total(op, mine)
            if total is not mine:
                self._threads.copy(total, mine)
            for member in self._others:
                self._threads.accumulate(op, total, self._see(member, number, mine))
            self._finish(op, total, mine)

        self._run(call, count, fill, drain, None if here else ())
        if here and wide is not flat:
            flat.copy_(wide)

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None:
        """Send inputs[k] to member k. output becomes the reduction of this member's inputs."""
        prepared = [_multiplied(part, op) for part in inputs]
        parts, op = [part for part, _ in prepared], prepared[0][1]
        width, count = self._cut(parts[self.rank], self.size)

        def fill(k: int, number: int) -> None:
            for member in self._others:
                self._put(number, parts[member][k * width : (k + 1) * width], at=member * width)

        def drain(k: int, number: int) -> None:
            mine, place = parts[self.rank][k * width : (k + 1) * width], output[k * width : (k + 1) * width]
            total = self._total(op, place)
            self._threads.copy(total, mine)
            for member in self._others:
                self._threads.accumulate(op, total, self._see(member, number, mine, at=self.rank * width))
            self._finish(op, total, place)

        self._run(call, count, fill, drain)

    def _total(self, op: Op, place: Tensor) -> Tensor:
        """The tensor in which to reduce for `place`: itself, or a wider one."""
        wide = reduction.working_dtype(op, place.dtype)
        if wide == place.dtype:
            return place
        scratch = self._scratch.get(wide)
        if scratch is None or scratch.numel() < place.numel():
            scratch = self._scratch[wide] = torch.empty(max(place.numel(), 4096), dtype=wide)
        return scratch[: place.numel()]

    def _finish(self, op: Op, total: Tensor, place: Tensor) -> None:
        self._threads.finish(op, total, self.size)
        if total is not place:
            self._threads.copy(place, total)

    # -- movements ------------------------------------------------------------------------------------------

    def barrier(self, call: Call) -> None:
        self._run(call, 1, lambda k, number: None, lambda k, number: None)

    def broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        here = self.rank == root
        width, count = self._cut(flat)

        def fill(k: int, number: int) -> None:
            if here:
                self._put(number, flat[k * width : (k + 1) * width])

        def drain(k: int, number: int) -> None:
            if not here:
                mine = flat[k * width : (k + 1) * width]
                self._threads.copy(mine, self._see(root, number, mine))

        self._run(call, count, fill, drain, () if here else (root,))

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> None:
        self._gather(call, outputs, mine, None)

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None:
        """outputs, at the root only, become every member's tensor."""
        self._gather(call, outputs if self.rank == root else (), mine, root)

    def _gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int | None) -> None:
        width, count = self._cut(mine)
        if outputs:
            self._threads.copy(outputs[self.rank], mine)

        def fill(k: int, number: int) -> None:
            if self.rank != root:
                self._put(number, mine[k * width : (k + 1) * width])

        def drain(k: int, number: int) -> None:
            for member in self._others if outputs else ():
                theirs = outputs[member][k * width : (k + 1) * width]
                self._threads.copy(theirs, self._see(member, number, theirs))

        self._run(call, count, fill, drain, None if outputs else ())

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Send each member one of the root's inputs."""
        here = self.rank == root
        width, count = self._cut(output, self.size)

        def fill(k: int, number: int) -> None:
            for member in self._others if here else ():
                self._put(number, inputs[member][k * width : (k + 1) * width], at=member * width)

        def drain(k: int, number: int) -> None:
            place = output[k * width : (k + 1) * width]
            if here:
                self._threads.copy(place, inputs[self.rank][k * width : (k + 1) * width])
            else:
                self._threads.copy(place, self._see(root, number, place, at=self.rank * width))

        self._run(call, count, fill, drain, () if here else (root,))

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """inputs[m] goes to member m, outputs[m] comes from it; sizes may differ from pair to pair."""
        wanted, counts = [part.numel() for part in outputs], [part.numel() for part in inputs]
        note = call.header.about[:NOTE_LIMIT]
        self._threads.copy(outputs[self.rank], inputs[self.rank][: wanted[self.rank]])
        ring, width = self._pieces, self._width(inputs[0].dtype, self.size)
        k, rounds = 0, 1
        with self._begin(call) as wait:
            while k < rounds:
                number = ring.free(self._others, wait)
                for member in self._others:
                    self._put(number, inputs[member][k * width : (k + 1) * width], at=member * width)
                if k == 0:
                    ring.write_note(self.rank, number, note + _SEPARATOR + b"".join(map(_COUNT.pack, counts)))
                ring.post(self.rank)
                if k == 0:
                    self._compare(number, note, wait)
                    rounds = max(1, math.ceil(self._largest(number, wanted, counts) / width))
                else:
                    ring.arrived(self._others, number, wait)
                for member in self._others:
                    place = outputs[member][k * width : (k + 1) * width]
                    self._threads.copy(place, self._see(member, number, place, at=self.rank * width))
                ring.done(self.rank)
                k += 1

    def _largest(self, number: int, wanted: Sequence[int], counts: Sequence[int]) -> int:
        """The largest count that any member sends to another, after a check that all counts agree."""
        largest = max(count for member, count in enumerate(counts) if member != self.rank)
        for member in self._others:
            packed = self._pieces.note(member, number).partition(_SEPARATOR)[2]
            theirs = [_COUNT.unpack_from(packed, at)[0] for at in range(0, len(packed), _COUNT.size)]
            if theirs[self.rank] != wanted[member]:
                raise CollectiveError(
                    f"all_to_all: {self.names[member]} sends {theirs[self.rank]} elements to "
                    f"{self.names[self.rank]}, which expects {wanted[member]}",
                    hint="the output sizes of each rank are the input sizes that the others have for it",
                )
            largest = max(largest, *(count for other, count in enumerate(theirs) if other != member))
        return largest

    # -- rounds ---------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> _Guard:
        if self._broken:
            raise RankGoneError(f"this group of processes is unusable: {self._broken}")
        return _Guard(self, Wait(call.deadline, self._check, lambda late: self._late(late, call)))

    def _run(self, call: Call, count: int, fill: Slice, drain: Slice, writers: Sequence[int] | None = None) -> None:
        """`count` rounds; slots are filled ahead while others still read.

        In the first round every member waits for all others and compares their notes. After that it waits only for
        `writers` (None: all others).
        """
        ring, rank, note = self._pieces, self.rank, call.header.about[:NOTE_LIMIT]
        needed = self._others if writers is None else writers
        with self._begin(call) as wait:
            filled = drained = 0
            while drained < count:
                # A piece that has arrived is read first, while it is in the cache. If it has not arrived, this
                # member fills further slots instead of waiting for a process that is slow or not running.
                if drained < filled and (
                    filled == count or ring.has(needed, ring.read_round) or not ring.is_free(self._others)
                ):
                    if drained == 0:
                        self._compare(ring.read_round, note, wait)
                    else:
                        ring.arrived(needed, ring.read_round, wait)
                    drain(drained, ring.read_round)
                    ring.done(rank)
                    drained += 1
                else:
                    number = ring.free(self._others, wait)
                    fill(filled, number)
                    if filled == 0:
                        ring.write_note(rank, number, note)
                    ring.post(rank)
                    filled += 1

    def _compare(self, number: int, note: bytes, wait: Wait) -> None:
        """Wait for all members' first round, and check that they are in the same collective."""
        ring = self._pieces
        ring.arrived(self._others, number, wait)
        if RUNNING.ranges is not None:
            RUNNING.ranges.met()
        if all(ring.note_is(other, number, note) for other in self._others):
            return
        found = {other: ring.note(other, number).partition(_SEPARATOR)[0] for other in self._others}
        if any(theirs != note for theirs in found.values()):
            notes = sorted({**found, self.rank: note}.items())
            told = "; ".join(f"{self.names[member]}: {text.decode(errors='replace')}" for member, text in notes)
            raise CollectiveError(f"{_DISAGREE}: {told}", hint=_AGREE)

    def _put(self, number: int, piece: Tensor, at: int = 0) -> None:
        """Copy a piece into this member's slot of a round."""
        self._threads.copy(self._pieces.slot(self.rank, number, piece.dtype)[at : at + piece.numel()], piece)

    def _see(self, member: int, number: int, like: Tensor, at: int = 0) -> Tensor:
        """A member's slot, with the length and type of `like`. Read it immediately; do not keep it."""
        return self._pieces.slot(member, number, like.dtype)[at : at + like.numel()]

    def _width(self, dtype: torch.dtype, parts: int = 1) -> int:
        """Elements of a piece, if a slot has this many parts."""
        return self._memory.sizes.slot_bytes // dtype.itemsize // parts // _ALIGN * _ALIGN

    def _cut(self, values: Tensor, parts: int = 1) -> tuple[int, int]:
        """Elements of a piece, and the number of pieces: at least one, so that members always meet."""
        width = self._width(values.dtype, parts)
        return width, max(1, -(-values.numel() // width))

    # -- waits that fail ------------------------------------------------------------------------------------

    def _check(self, missing: Callable[[], list[int]]) -> None:
        told = self._memory.told()
        if told:
            text = f"a collective between processes of one machine ended early: {told}"
            # A disagreement that another member reports is raised as if this one had found it.
            raise CollectiveError(text, hint=_AGREE) if _DISAGREE in told else RankGoneError(text)
        if self._broken:
            raise RankGoneError(f"the wait for other processes was ended: {self._broken}")
        lost = self._memory.gone() | self._memory.left()
        # Asked afterwards: a member that has done its part and left is not missing.
        if lost and (absent := lost.intersection(missing())):
            dead = ", ".join(self.names[member] for member in sorted(absent))
            raise RankGoneError(
                f"{dead} ended while others were waiting for it",
                hint="the first failure is in that process's own output",
            )

    def _late(self, late: Iterable[int], call: Call) -> Exception:
        names = ", ".join(self.names[member] for member in late)
        return CollectiveTimeoutError(
            f"{names} did not come within {round(call.deadline - call.began, 2):g} s",
            hint="it may be stuck, or be in another collective; look at its own output",
        )


def _multiplied(values: Tensor, op: Op) -> tuple[Tensor, Op]:
    """The values to reduce and the operation: PREMUL_SUM becomes the SUM of a wider, multiplied copy."""
    reduction.check(op, values.dtype)
    if reduction.name_of(op) != "PREMUL_SUM":
        return values, op
    wide = values.to(reduction.working_dtype(op, values.dtype), copy=True)
    reduction.premul(op, wide)
    return wide, SUM
