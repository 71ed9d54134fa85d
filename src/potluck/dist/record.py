"""Describes a group's collectives for people: owns which one runs, and the error of one that hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.dist.config import TRACE, ranks_text
from potluck.errors import CollectiveTimeoutError
from potluck.units import bytes_text, seconds_text

log = logging.getLogger("potluck.dist")

_MOST_LINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The description of a collective, the same on all ranks."""

    op: str
    """all_reduce, broadcast, ..."""
    dtype: str = ""
    """float32, ...; empty: ranks may differ."""
    shape: tuple[int, ...] | None = None
    """None: ranks may differ, as in an all-to-all with unequal parts."""
    nbytes: int = 0
    reduction: str = ""
    """SUM, ...; empty where nothing is reduced."""
    root: int | None = None
    about: bytes = field(init=False, compare=False)
    """The description as text, which ranks compare."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "about", self.text().encode())

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


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of this rank, with its number and its deadline."""

    header: Header
    seq: int
    """Each group counts its collectives, from 1."""
    began: float
    deadline: float

    @property
    def name(self) -> str:
        return f"{self.header.op} #{self.seq}"

    @property
    def left_s(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def timeout_error(self, missing: Mapping[int, str]) -> CollectiveTimeoutError:
        """The error of a collective that did not finish.

        `missing`: ranks that never joined it, with their last known activity; empty if all joined and one of them
        stalled.
        """
        missed = sorted(missing)
        if missed:
            why = f"{ranks_text(missed)} never came"
            hint = f"look at the output of {ranks_text(missed)}: they are elsewhere, stopped or cut off"
        else:
            why = "every rank came, but not all of the data"
            hint = "a link or a rank stalled in the middle; a longer timeout helps if it is only slow"
        waited = seconds_text(time.monotonic() - self.began)
        text = f"{self.name} ({self.header.details()}) did not finish within the timeout of {waited}: {why}"
        seen = [f"  rank {rank}: {missing[rank]}" for rank in missed]
        return CollectiveTimeoutError("\n".join([text, *seen[:_MOST_LINES]]), hint=hint)


class Record:
    """The present activity of one group on this rank. Usable from any thread."""

    def __init__(self, group: str, rank: int) -> None:
        self._group, self._rank = group, rank
        self._lock = threading.Lock()
        self._open: dict[int, Header] = {}
        self._last = ""
        """The last collective that succeeded."""

    def add(self, seq: int, header: Header) -> None:
        """A collective was requested."""
        with self._lock:
            self._open[seq] = header

    def start(self, seq: int) -> None:
        self._trace(seq, self._open[seq], "running")

    def end(self, seq: int, took_s: float, *, failed: bool = False) -> None:
        with self._lock:
            header = self._open.pop(seq)
            if not failed:
                self._last = f"{header.op} #{seq}"
        self._trace(seq, header, f"{'failed' if failed else 'done'} {took_s:.6f} s")

    def _trace(self, seq: int, header: Header, state: str) -> None:
        if log.isEnabledFor(TRACE):
            words = (self._rank, self._group, seq, header.text(), state)
            log.log(TRACE, "rank %d, group %s: #%d %s %s", *words)

    def where(self) -> str:
        """This rank's present or last activity, for other ranks."""
        with self._lock:
            for seq, header in self._open.items():
                return f"in {header.op} #{seq}"
            return f"after {self._last}" if self._last else "before its first collective"
