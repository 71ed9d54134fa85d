"""Owns what is known of a group's collectives: what each is, which one runs, and the words for one that hangs.

It must not know links or tensors: a collective is a header.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.dist.config import TRACE, ranks_text
from potluck.errors import CollectiveTimeoutError
from potluck.units import bytes_text, seconds_text

log = logging.getLogger("potluck.dist")

_MOST_LINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a collective is, in words for people."""

    seq: int
    """Counted by each group on its own, from 0."""
    op: str
    """all_reduce, broadcast, ..."""
    dtype: str = ""
    """float32, ...; empty: ranks may differ."""
    shape: tuple[int, ...] | None = None
    """None: ranks may differ, as in an all-to-all with unequal parts."""
    nbytes: int = 0
    """For people; not compared."""
    reduction: str = ""
    """SUM, ...; empty where nothing is reduced."""
    root: int | None = None

    def text(self) -> str:
        """all_reduce SUM float32 [1024, 8], 32.8 kB."""
        return f"{self.op} {self.details()}"

    def details(self) -> str:
        """SUM float32 [1024, 8], 32.8 kB."""
        words = [self.reduction, self.dtype]
        if self.shape is not None:
            words.append(str(list(self.shape)))
        if self.root is not None:
            words.append(f"root {self.root}")
        about = " ".join(word for word in words if word)
        return (f"{about}, " if about else "") + bytes_text(self.nbytes)


def timeout_error(
    header: Header,
    *,
    missing: Sequence[int],
    waited_s: float,
    last_seen: Mapping[int, str] | None = None,
) -> CollectiveTimeoutError:
    """The error of a collective that did not finish.

    Args:
        missing: ranks that never came to it; empty where all came and one of them stalled.
        last_seen: for some of them, the last thing they were known to do.
    """
    what = f"{header.op} #{header.seq}"
    missed = sorted(missing)
    if missed:
        why = f"{ranks_text(missed)} never came"
        hint = f"look at the output of {ranks_text(missed)}: they are elsewhere, stopped or cut off"
    else:
        why = "every rank came, but not all of the data"
        hint = "a link or a rank stalled in the middle; a longer timeout helps if it is only slow"
    seen = [f"  rank {rank}: {last_seen[rank]}" for rank in missed if last_seen and rank in last_seen]
    text = f"{what} ({header.details()}) did not finish within the timeout of {seconds_text(waited_s)}: {why}"
    return CollectiveTimeoutError("\n".join([text, *seen[:_MOST_LINES]]), hint=hint)


class Entry:
    """One collective in the record, until it has ended."""

    __slots__ = ("_began", "_record", "header")

    def __init__(self, record: Record, header: Header) -> None:
        self._record, self.header = record, header
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        self._record._trace(self.header, "running")

    def end(self, *, failed: bool = False) -> None:
        took = f" {time.perf_counter() - self._began:.6f} s"
        self._record._end(self, failed)
        self._record._trace(self.header, ("failed" if failed else "done") + took)


class Record:
    """What one group on this rank is doing; may be used from any thread."""

    def __init__(self, group: str, rank: int) -> None:
        self._group, self._rank = group, rank
        self._lock = threading.Lock()
        self._open: dict[Entry, None] = {}
        self._last: Header | None = None
        """The last collective that ended well."""

    def add(self, header: Header) -> Entry:
        """A collective that was asked for."""
        entry = Entry(self, header)
        with self._lock:
            self._open[entry] = None
        return entry

    def where(self) -> str:
        """In words for other ranks: what this one does, or did last."""
        with self._lock:
            oldest, last = next(iter(self._open), None), self._last
        if oldest is not None:
            return f"in {oldest.header.op} #{oldest.header.seq}"
        return f"after {last.op} #{last.seq}" if last else "before its first collective"

    def _end(self, entry: Entry, failed: bool) -> None:
        with self._lock:
            self._open.pop(entry, None)
            if not failed:
                self._last = entry.header

    def _trace(self, header: Header, state: str) -> None:
        if log.isEnabledFor(TRACE):
            log.log(
                TRACE, "rank %d, group %s: #%d %s %s", self._rank, self._group, header.seq, header.text(), state
            )
