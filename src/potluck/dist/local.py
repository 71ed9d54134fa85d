"""Collectives between processes of one machine through shared memory; owns how a tensor's parts pass through it.

It must not know of other machines, of devices (tensors are flat, contiguous, in host memory) or of torch's groups.

Every process copies a piece of its tensor into a slot of its own, reads the others' slots in place with torch's
operations, and goes on with the next piece while the others still read; only long reductions go another way, in
local_chain. A tensor itself is never mapped by another process, so its owner may free it once the call has returned
or failed.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.counting import SPENT
from potluck.dist.local_chain import part_of
from potluck.dist.local_hands import Hands, number_of
from potluck.dist.local_memory import GroupMemory, Sizes
from potluck.dist.local_rounds import NOTE_LIMIT, SEPARATOR, Rounds, note_of
from potluck.dist.rings import Patience
from potluck.errors import CollectiveError
from potluck.limits import usable_cores

SUM = dist.ReduceOp.SUM
_PLAIN = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Types that are added up as they are."""
_COUNT = struct.Struct("<q")


class LocalGroup(Rounds):
    """`size` processes of one machine; all of them call the same collectives in the same order.

    One thread at a time may run collectives. Tensors are flat, contiguous and in host memory. `note` says what a
    caller believes to be doing: where the notes of two members differ, all of them raise CollectiveError with both.
    After any error the group is of no use.
    """

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
        """Meet the other members through `store` (torch's); every member raises where one of them cannot attach.

        `copy_threads`: how many copy for this member; 0: as many as there are cores for each, at most four.
        For other sizes than the usual ones: `LocalGroup(GroupMemory.meet(..., sizes=Sizes(...)))`.
        """
        memory = GroupMemory.meet(store, prefix, rank, size, sizes=Sizes(), timeout_s=timeout_s)
        return cls(memory, names, hands=Hands(number_of(copy_threads, usable_cores(), size)))

    # Reductions

    def all_reduce(self, values: Tensor, op: Any = SUM, *, timeout_s: float, note: bytes = b"") -> None:
        """`values` [n], in place: the reduction over all members, the same bits for each."""
        note = note or note_of("all_reduce", values, op)
        sizes = self._memory.sizes
        long = min(sizes.part_bytes * self.size, sizes.slot_bytes)
        small = long if self.size == 2 else min(long, sizes.small_bytes)
        if reduction.name_of(op) == "SUM" and values.dtype in _PLAIN and values.nbytes <= small:
            self._sum_small(values, timeout_s, note)
            return
        wide, op = _multiplied(values, op)
        if wide.nbytes > long:
            self._reduce_along(wide, op, timeout_s, note)
        elif wide.nbytes <= small:
            self._reduce_everywhere(wide, op, timeout_s, note)
        else:
            self._reduce_in_parts(wide, op, timeout_s, note)
        if wide is not values:
            values.copy_(wide)

    def _sum_small(self, values: Tensor, timeout_s: float, note: bytes) -> None:
        """What `_reduce_everywhere` would do, with as few calls as will do: here every microsecond counts."""
        ring, rank, dtype, count = self._pieces, self.rank, values.dtype, values.numel()
        with self._begin(timeout_s) as patience:
            number = ring.free(self._others, patience)
            ring.slot(rank, number, dtype)[:count].copy_(values)
            ring.write_note(rank, number, note)
            ring.post(rank)
            self._compare(number, note, patience)
            if self.size > 2:
                values.copy_(ring.slot(0, number, dtype)[:count])
            began = time.perf_counter()
            for member in range(1, self.size) if self.size > 2 else self._others:
                values.add_(ring.slot(member, number, dtype)[:count])
            SPENT.reduction += time.perf_counter() - began
            ring.done(rank)

    def _reduce_everywhere(self, values: Tensor, op: Any, timeout_s: float, note: bytes) -> None:
        """Everybody reads everything, in one round: best for what is small, and for two."""

        def drain(k: int, number: int) -> None:
            # Two values are rounded once, in whatever order and width; more are added up in the same order by
            # everybody, so that all get the same bits.
            if self.size == 2 and reduction.name_of(op) != "AVG":
                reduction.accumulate(op, values, self._see(1 - self.rank, number, values))
                return
            total = self._total(op, values)
            total.copy_(self._see(0, number, values))
            for member in range(1, self.size):
                reduction.accumulate(op, total, self._see(member, number, values))
            self._settle(op, total, values)

        self._run(self._begin(timeout_s), note, 1, lambda k, number: self._put(number, values), drain)

    def _reduce_along(self, values: Tensor, op: Any, timeout_s: float, note: bytes) -> None:
        """Sums pass from member to member: best for what is long."""
        ring = self._pieces
        with self._begin(timeout_s) as patience:
            number = ring.free(self._others, patience)
            ring.write_note(self.rank, number, note)
            ring.post(self.rank)

            def agree() -> None:
                self._compare(number, note, patience)
                ring.done(self.rank)

            self._memory.chain.all_reduce(values, op, self._hands, patience, agree)

    def _reduce_in_parts(self, values: Tensor, op: Any, timeout_s: float, note: bytes) -> None:
        """Each member reduces a part and hands the result on: fewer bytes for many, in two rounds.

        So everything is copied in, one part of it reduced, and the other parts' results copied out.
        """
        ring, out, rank = self._pieces, self._results, self.rank
        with self._begin(timeout_s) as patience:
            number = ring.free(self._others, patience)
            self._put_for_others(number, values)
            ring.write_note(rank, number, note)
            ring.post(rank)
            self._compare(number, note, patience)
            part = self._reduce_part(values, number, op)
            ring.done(rank)
            number = out.free(self._others, patience)
            out.slot(rank, number, values.dtype)[: part.numel()].copy_(part)
            out.post(rank)
            self._collect(values, number, patience)
            out.done(rank)

    def _put_for_others(self, number: int, piece: Tensor) -> None:
        """Copy in all of the values but this member's own part, which nobody else reads."""
        start, stop = part_of(piece.numel(), self.rank, self.size)
        self._put(number, piece[:start])
        self._put(number, piece[stop:], at=stop)

    def _reduce_part(self, piece: Tensor, number: int, op: Any) -> Tensor:
        """This member's part of a piece, reduced in place from the others' slots."""
        start, stop = part_of(piece.numel(), self.rank, self.size)
        mine = piece[start:stop]
        total = self._total(op, mine)
        if total is not mine:
            total.copy_(mine)
        for member in self._others:
            reduction.accumulate(op, total, self._see(member, number, mine, at=start))
        self._settle(op, total, mine)
        return mine

    def _collect(self, piece: Tensor, number: int, patience: Patience) -> None:
        """Copy out the parts that the others have reduced."""
        for member in self._others:
            self._results.arrived((member,), number, patience)
            start, stop = part_of(piece.numel(), member, self.size)
            piece[start:stop].copy_(self._results.slot(member, number, piece.dtype)[: stop - start])

    def reduce(self, values: Tensor, root: int, op: Any = SUM, *, timeout_s: float, note: bytes = b"") -> None:
        """`values` [n] of `root` become the reduction; the others' stay as they are."""
        note = note or note_of("reduce", values, op, root)
        wide, op = _multiplied(values, op)
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
                self._hands.copy(total, mine)
            for member in self._others:
                self._hands.accumulate(op, total, self._see(member, number, mine))
            self._settle(op, total, mine)

        self._run(self._begin(timeout_s), note, count, fill, drain, None if here else ())
        if here and wide is not values:
            values.copy_(wide)

    def reduce_scatter(
        self, out: Tensor, values: Tensor, op: Any = SUM, *, timeout_s: float, note: bytes = b""
    ) -> None:
        """`out` [n] becomes this member's part of the reduction of `values` [size * n]."""
        self._fits("reduce_scatter", values.numel(), out.numel() * self.size)
        note = note or note_of("reduce_scatter", values, op)
        wide, op = _multiplied(values, op)
        parts = wide.view(self.size, -1)
        width, count = self._cut(wide[: out.numel()], self.size)

        def fill(k: int, number: int) -> None:
            for member in self._others:
                self._put(number, parts[member, k * width : (k + 1) * width], at=member * width)

        def drain(k: int, number: int) -> None:
            mine, place = parts[self.rank, k * width : (k + 1) * width], out[k * width : (k + 1) * width]
            total = self._total(op, place)
            self._hands.copy(total, mine)
            for member in self._others:
                self._hands.accumulate(op, total, self._see(member, number, mine, at=self.rank * width))
            self._settle(op, total, place)

        self._run(self._begin(timeout_s), note, count, fill, drain)

    def _settle(self, op: Any, total: Tensor, place: Tensor) -> None:
        self._hands.finish(op, total, self.size)
        if total is not place:
            self._hands.copy(place, total)

    # What only moves

    def barrier(self, *, timeout_s: float, note: bytes = b"") -> None:
        """Returns when every member has called it."""
        self._run(self._begin(timeout_s), note or b"barrier", 1, lambda k, number: None, lambda k, number: None)

    def broadcast(self, values: Tensor, root: int, *, timeout_s: float, note: bytes = b"") -> None:
        """`values` [n] of `root` come to everybody."""
        here = self.rank == root
        width, count = self._cut(values)

        def fill(k: int, number: int) -> None:
            if here:
                self._put(number, values[k * width : (k + 1) * width])

        def drain(k: int, number: int) -> None:
            if not here:
                mine = values[k * width : (k + 1) * width]
                self._hands.copy(mine, self._see(root, number, mine))

        note = note or note_of("broadcast", values, root=root)
        self._run(self._begin(timeout_s), note, count, fill, drain, () if here else (root,))

    def all_gather(self, out: Tensor, values: Tensor, *, timeout_s: float, note: bytes = b"") -> None:
        """`out` [size * n] becomes everybody's `values` [n], in the order of the members."""
        self._fits("all_gather", out.numel(), values.numel() * self.size)
        self._gather(out, values, None, timeout_s, note or note_of("all_gather", values))

    def gather(self, out: Tensor | None, values: Tensor, root: int, *, timeout_s: float, note: bytes = b"") -> None:
        """`out` [size * n] of `root` becomes everybody's `values` [n]; the others give None."""
        if self.rank == root:
            self._fits("gather", 0 if out is None else out.numel(), values.numel() * self.size)
        here = out if self.rank == root else None
        self._gather(here, values, root, timeout_s, note or note_of("gather", values, root=root))

    def _gather(self, out: Tensor | None, values: Tensor, root: int | None, timeout_s: float, note: bytes) -> None:
        width, count = self._cut(values)
        parts = None if out is None else out.view(self.size, -1)
        if parts is not None:
            self._hands.copy(parts[self.rank], values)

        def fill(k: int, number: int) -> None:
            if self.rank != root:
                self._put(number, values[k * width : (k + 1) * width])

        def drain(k: int, number: int) -> None:
            if parts is not None:
                for member in self._others:
                    theirs = parts[member, k * width : (k + 1) * width]
                    self._hands.copy(theirs, self._see(member, number, theirs))

        self._run(self._begin(timeout_s), note, count, fill, drain, () if parts is None else None)

    def scatter(
        self, out: Tensor, values: Tensor | None, root: int, *, timeout_s: float, note: bytes = b""
    ) -> None:
        """`out` [n] becomes this member's part of `values` [size * n] of `root`; the others give None."""
        here = self.rank == root
        if here:
            self._fits("scatter", 0 if values is None else values.numel(), out.numel() * self.size)
        parts = values.view(self.size, -1) if here and values is not None else None
        width, count = self._cut(out, self.size)

        def fill(k: int, number: int) -> None:
            if parts is not None:
                for member in self._others:
                    self._put(number, parts[member, k * width : (k + 1) * width], at=member * width)

        def drain(k: int, number: int) -> None:
            place = out[k * width : (k + 1) * width]
            if parts is not None:
                self._hands.copy(place, parts[self.rank, k * width : (k + 1) * width])
            else:
                self._hands.copy(place, self._see(root, number, place, at=self.rank * width))

        note = note or note_of("scatter", out, root=root)
        self._run(self._begin(timeout_s), note, count, fill, drain, () if here else (root,))

    def all_to_all(
        self,
        out: Tensor,
        values: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        *,
        timeout_s: float,
        note: bytes = b"",
    ) -> None:
        """`values` hold `counts[m]` elements for each member m, `out` gets `out_counts[m]` from each."""
        self._fits("all_to_all", values.numel(), sum(counts))
        self._fits("all_to_all", out.numel(), sum(out_counts))
        note = (note or f"all_to_all {values.dtype}".encode())[:NOTE_LIMIT]
        mine, places = values.split(list(counts)), out.split(list(out_counts))
        self._hands.copy(places[self.rank], mine[self.rank][: places[self.rank].numel()])
        ring, width = self._pieces, self._width(values.dtype, self.size)
        k, rounds = 0, 1
        with self._begin(timeout_s) as patience:
            while k < rounds:
                number = ring.free(self._others, patience)
                for member in self._others:
                    self._put(number, mine[member][k * width : (k + 1) * width], at=member * width)
                if k == 0:
                    ring.write_note(self.rank, number, note + SEPARATOR + b"".join(map(_COUNT.pack, counts)))
                ring.post(self.rank)
                if k == 0:
                    self._compare(number, note, patience)
                    rounds = max(1, math.ceil(self._largest(number, out_counts, counts) / width))
                else:
                    ring.arrived(self._others, number, patience)
                for member in self._others:
                    place = places[member][k * width : (k + 1) * width]
                    self._hands.copy(place, self._see(member, number, place, at=self.rank * width))
                ring.done(self.rank)
                k += 1

    def _largest(self, number: int, wanted: Sequence[int], counts: Sequence[int]) -> int:
        """The most that any member sends to another, after a look at whether they mean the same."""
        largest = max(count for member, count in enumerate(counts) if member != self.rank)
        for member in self._others:
            packed = self._pieces.note(member, number).partition(SEPARATOR)[2]
            theirs = [_COUNT.unpack_from(packed, at)[0] for at in range(0, len(packed), _COUNT.size)]
            if theirs[self.rank] != wanted[member]:
                raise CollectiveError(
                    f"all_to_all: {self.names[member]} sends {theirs[self.rank]} elements to "
                    f"{self.names[self.rank]}, which expects {wanted[member]}",
                    hint="the output sizes of each rank are the input sizes that the others have for it",
                )
            largest = max(largest, *(count for other, count in enumerate(theirs) if other != member))
        return largest


def _multiplied(values: Tensor, op: Any) -> tuple[Tensor, Any]:
    """The values to reduce and by what: PREMUL_SUM becomes the SUM of a wider, multiplied copy."""
    reduction.check(op, values.dtype)
    if reduction.name_of(op) != "PREMUL_SUM":
        return values, op
    wide = values.to(reduction.working_dtype(op, values.dtype), copy=True)
    reduction.premul(op, wide)
    return wide, SUM
