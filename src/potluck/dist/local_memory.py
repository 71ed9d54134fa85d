"""The shared memory of a local group: owns its layout, how members attach, and which have ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch

from potluck import checked
from potluck.bounds import Positive, Text
from potluck.dist.local_chain import Chain
from potluck.dist.rings import Ring, Shape
from potluck.dist.shm import LINE_BYTES, Processes, Segment, Words, available
from potluck.errors import CollectiveError, NetworkError, WireError
from potluck.limits import logical_cores

MAX_MEMBERS = 64
_PAGE = 4096
_REASON_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The memory of a local group, and the sizes at which its algorithms change."""

    slot_bytes: int = 4 * 1024 * 1024
    """The largest piece of a tensor. Pieces as small as a core's own cache save a fifth of the memory traffic, but
    on a busy machine each further piece is one more wait for a process that is not running."""
    depth: int = 3
    """Pieces of one member that may be in flight."""
    small_bytes: int = 64 * 1024
    """Up to this size every member reads everything, which takes one round instead of two."""
    part_bytes: int = 512 * 1024
    """Above this size for each member, sums pass from one to the next, which takes a turn for each."""
    long_bytes: int = 32 * 1024 * 1024
    """The largest piece for that. The C library copies past the caches from 20 MB on, so pieces of half the length
    would be copied at half the speed. DDP's buckets of 25 MiB fit in."""
    spins: int | None = None
    """Number of checks before a wait sleeps; None: many if every member can have a core, else few."""

    def __post_init__(self) -> None:
        if any(size % _PAGE or size < _PAGE for size in (self.slot_bytes, self.long_bytes)):
            raise ValueError("slots are whole pages")
        if self.depth < 2:
            raise ValueError("two slots at least: one is read while the next is filled")


class LocalMember(msgspec.Struct, frozen=True, kw_only=True):
    """What each member tells the others through torch's store before they share memory."""

    pid: Positive
    fault: Text
    """Why it cannot share memory; empty if it can."""


class GroupMemory:
    """One member's view of the group's memory."""

    def __init__(self, segment: Segment, rank: int, size: int, sizes: Sizes) -> None:
        self.rank, self.size, self.sizes = rank, size, sizes
        self._segment = segment
        self._processes = Processes({})
        self._at = 0
        self._offset_of_reason = self._take(_REASON_BYTES)
        rings = _shapes(size, sizes)
        count = 1 + size + sum(shape.words for shape in rings)
        spins = sizes.spins if sizes.spins is not None else (300 if logical_cores() >= size else 30)
        self.words = Words(self._slice(self._take(count * LINE_BYTES), count * LINE_BYTES), count, spins=spins)
        self._next_word = 1 + size
        self._bytes = torch.frombuffer(segment.view, dtype=torch.uint8)
        self.pieces, self.results, turns = (self._ring(shape) for shape in rings)
        at = self._take(sizes.long_bytes)
        self.chain = Chain(rank, size, turns, self._bytes[at : at + sizes.long_bytes])

    @classmethod
    def meet(
        cls, store: Any, prefix: str, rank: int, size: int, *, sizes: Sizes, timeout_s: float = 60.0
    ) -> GroupMemory:
        """Member 0 creates the memory and the others attach. Its name is removed before this returns.

        Raises:
            NetworkError: on every member, if one of them could not.
        """
        if not 2 <= size <= MAX_MEMBERS:
            raise CollectiveError(f"a local group has 2 to {MAX_MEMBERS} members, not {size}")
        ok, why = available()
        segment, fault = None, "" if ok else why
        try:
            if not ok:
                raise NetworkError(why)
            if rank == 0:
                segment = Segment.create(nbytes_of(size, sizes))
                store.set(f"{prefix}/segment", segment.address)
            else:
                segment = Segment.attach(_get(store, f"{prefix}/segment", timeout_s))
        except (NetworkError, OSError, ValueError) as error:
            fault = str(error)
            if rank == 0:
                store.set(f"{prefix}/segment", "none")
        store.set(
            f"{prefix}/member/{rank}", msgspec.json.encode(LocalMember(pid=os.getpid(), fault=fault)).decode()
        )
        try:
            keys = [f"{prefix}/member/{other}" for other in range(size)]
            found = [_member(_get(store, key, timeout_s)) for key in keys]
        finally:
            if segment is not None:
                segment.forget_name()
        faults = [f"local member {other}: {it.fault}" for other, it in enumerate(found) if it.fault]
        if faults or segment is None:
            if segment is not None:
                segment.close()
            raise NetworkError(f"no shared memory between these processes: {'; '.join(faults)}")
        memory = cls(segment, rank, size, sizes)
        memory._processes = Processes({other: it.pid for other, it in enumerate(found) if other != rank})
        return memory

    def tell(self, reason: str) -> None:
        """Tell all members why this group has ended; the first reason is kept."""
        if not self.words.read(0):
            text = reason.encode()[: _REASON_BYTES - 1]
            at = self._offset_of_reason
            self._segment.view[at : at + len(text) + 1] = text + b"\0"
            self.words.write(0, 1)

    def told(self) -> str:
        """The reason that a member has given, or an empty string."""
        if not self.words.read(0):
            return ""
        at = self._offset_of_reason
        return bytes(self._segment.view[at : at + _REASON_BYTES]).partition(b"\0")[0].decode(errors="replace")

    def gone(self) -> set[int]:
        """Members whose processes have ended."""
        return self._processes.gone()

    def left(self) -> set[int]:
        """Members that have closed the group."""
        return {other for other in range(self.size) if self.words.read(1 + other)}

    def close(self) -> None:
        self.words.write(1 + self.rank, 1)
        self._processes.close()
        self._segment.forget_name()

    def _take(self, nbytes: int) -> int:
        at = self._at
        self._at += _pages(nbytes)
        return at

    def _slice(self, at: int, nbytes: int) -> memoryview:
        return self._segment.view[at : at + nbytes]

    def _ring(self, shape: Shape) -> Ring:
        notes = self._slice(self._take(shape.note_bytes), shape.note_bytes)
        at = self._take(shape.data_bytes)
        ring = Ring(shape, self.words, self._next_word, notes, self._bytes[at : at + shape.data_bytes])
        self._next_word += shape.words
        return ring


def nbytes_of(size: int, sizes: Sizes) -> int:
    """Size of the address space; the system allocates memory when a page is first used."""
    rings = _shapes(size, sizes)
    words = 1 + size + sum(shape.words for shape in rings)
    data_bytes = sum(_pages(shape.note_bytes) + _pages(shape.data_bytes) for shape in rings)
    return _pages(_REASON_BYTES) + _pages(words * LINE_BYTES) + data_bytes + sizes.long_bytes


def _shapes(size: int, sizes: Sizes) -> tuple[Shape, Shape, Shape]:
    """The rings of the pieces, the results and the turns."""
    pieces = Shape(writers=size, readers=size, depth=sizes.depth, slot_bytes=sizes.slot_bytes)
    results = Shape(
        writers=size, readers=size, depth=sizes.depth, slot_bytes=_pages(sizes.slot_bytes // size + 64 * 16)
    )
    turns = Shape(writers=size, readers=0, depth=1, slot_bytes=0)
    return pieces, results, turns


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _member(text: str) -> LocalMember:
    try:
        return checked.decode(text, LocalMember)
    except msgspec.DecodeError as error:
        raise WireError(f"the store holds no member of a local group: {error}") from error


def _get(store: Any, key: str, timeout_s: float) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise NetworkError(
            f"a process of this machine did not come within {timeout_s:g} s: {key}",
            hint="look at its own output for why",
        ) from error
    found: bytes = store.get(key)
    return found.decode()
