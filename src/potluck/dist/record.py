"""Owns the memory of what each group did: its last collectives, and the words for those that went wrong.

It must not know links or tensors: a collective is a header, and headers of several ranks can be compared.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.dist.config import TRACE, ranks_text
from potluck.errors import CollectiveError, CollectiveTimeoutError, WireError
from potluck.units import bytes_text, seconds_text

log = logging.getLogger("potluck.dist")

_KEPT = 512
_MOST_HEADER_BYTES = 4096
_MOST_DIMENSIONS = 64
_MOST_LINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank says of the collective that it is in; enough to see whether all are in the same."""

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

    def pack(self) -> bytes:
        """For the other ranks."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """What `pack` made. WireError for anything else: what arrives is never trusted."""
        try:
            if len(raw) > _MOST_HEADER_BYTES:
                raise ValueError
            fields: dict[str, Any] = json.loads(raw)
            shape = fields.pop("shape")
            header = cls(shape=None if shape is None else tuple(shape), **fields)
            _check(header)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise WireError(
                "a rank sent a header that is none", hint="all ranks must run the same version of potluck"
            ) from None
        return header


def _check(header: Header) -> None:
    sizes = header.shape or ()
    root = 0 if header.root is None else header.root
    whole = all(type(n) is int and n >= 0 for n in (header.seq, header.nbytes, root, *sizes))
    words = (header.op, header.dtype, header.reduction)
    if not whole or len(sizes) > _MOST_DIMENSIONS or not all(isinstance(w, str) and len(w) < 64 for w in words):
        raise ValueError


_COMPARED = {
    "seq": "sequence number",
    "op": "collective",
    "reduction": "reduction",
    "dtype": "dtype",
    "shape": "shape",
    "root": "root",
}


def compare(headers: Mapping[int, Header]) -> CollectiveError | None:
    """What to raise where the ranks are not in the same collective; None where they are.

    The text is the same on every rank that has the same headers, and shows every side.
    """
    different = [
        words for name, words in _COMPARED.items() if len({getattr(h, name) for h in headers.values()}) > 1
    ]
    if not different:
        return None
    sides: dict[str, list[int]] = {}
    numbered = _COMPARED["seq"] in different
    for rank in sorted(headers):
        header = headers[rank]
        text = f"#{header.seq} {header.text()}" if numbered else header.text()
        sides.setdefault(text, []).append(rank)
    # The side that most are on first: whoever differs stands below it.
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"  and {len(ordered) - _MOST_LINES} more")
    first = "" if numbered else f" #{min(h.seq for h in headers.values())}"
    return CollectiveError(
        "\n".join([f"the ranks disagree at collective{first} in {' and '.join(different)}:", *lines]),
        hint="every rank must make the same calls in the same order, with tensors of the same shape and dtype",
    )


def timeout_error(
    header: Header,
    *,
    missing: Sequence[int],
    waited_s: float,
    group: str = "",
    last_seen: Mapping[int, str] | None = None,
) -> CollectiveTimeoutError:
    """The error of a collective that did not finish.

    Args:
        missing: ranks that never came to it; empty where all came and one of them stalled.
        last_seen: for some of them, the last thing they were known to do.
    """
    what = f"{header.op} #{header.seq}" + (f" of group {group}" if group else "")
    parts = header.text().removeprefix(header.op).strip(" ,")
    missed = sorted(missing)
    if missed:
        why = f"{ranks_text(missed)} never came"
        hint = f"look at the output of {ranks_text(missed)}: they are elsewhere, stopped or cut off"
    else:
        why = "every rank came, but not all of the data"
        hint = "a link or a rank stalled in the middle; a longer timeout helps if it is only slow"
    seen = [f"  rank {rank}: {last_seen[rank]}" for rank in missed if last_seen and rank in last_seen]
    text = f"{what} ({parts}) did not finish within the timeout of {seconds_text(waited_s)}: {why}"
    return CollectiveTimeoutError("\n".join([text, *seen[:_MOST_LINES]]), hint=hint)


class Entry:
    """One collective in the record. It goes from queued to running to done, failed or aborted."""

    __slots__ = ("_record", "ended_s", "error", "header", "queued_s", "started_s", "state")

    def __init__(self, record: Record, header: Header, now_s: float) -> None:
        self._record, self.header = record, header
        self.state = "queued"
        self.queued_s = now_s
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.error = ""

    def start(self) -> None:
        self._record._move(self, "running")

    def finish(self) -> None:
        self._record._move(self, "done")

    def fail(self, error: BaseException | str) -> None:
        self._record._move(self, "failed", str(error) or type(error).__name__)

    def abort(self) -> None:
        self._record._move(self, "aborted")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times are seconds since the record began."""
        row = {**asdict(self.header), "state": self.state, "queued_s": round(self.queued_s, 6)}
        row["started_s"] = None if self.started_s is None else round(self.started_s, 6)
        row["ended_s"] = None if self.ended_s is None else round(self.ended_s, 6)
        return {**row, "error": self.error} if self.error else row


_FINAL = frozenset({"done", "failed", "aborted"})


class Record:
    """The last collectives of one group on this rank, oldest first; may be used from any thread."""

    def __init__(
        self, group: str, rank: int, *, keep: int = _KEPT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.group, self.rank = group, rank
        self._clock, self._began = clock, clock()
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=keep)
        self._forgotten = 0

    def add(self, header: Header) -> Entry:
        """A collective that was asked for."""
        with self._lock:
            if len(self._entries) == self._entries.maxlen:
                self._forgotten += 1
            entry = Entry(self, header, self._clock() - self._began)
            self._entries.append(entry)
            return entry

    def entries(self) -> list[dict[str, Any]]:
        with self._lock:
            return [entry.as_dict() for entry in self._entries]

    def unfinished(self) -> list[Header]:
        """What was asked for and has no end yet, oldest first."""
        with self._lock:
            return [entry.header for entry in self._entries if entry.state not in _FINAL]

    def last_done(self) -> Header | None:
        with self._lock:
            done = [entry.header for entry in self._entries if entry.state == "done"]
        return done[-1] if done else None

    def where(self) -> str:
        """In words for other ranks: what this one does, or did last."""
        waiting, last = self.unfinished(), self.last_done()
        if waiting:
            return f"in {waiting[0].op} #{waiting[0].seq}"
        return f"after {last.op} #{last.seq}" if last else "before its first collective"

    def lines(self) -> Iterator[str]:
        """The record as JSON lines: one for the group, then one for each collective."""
        with self._lock:
            head = {"group": self.group, "rank": self.rank, "forgotten": self._forgotten}
            head["now_s"] = round(self._clock() - self._began, 6)
            rows = [entry.as_dict() for entry in self._entries]
        yield json.dumps(head)
        for row in rows:
            yield json.dumps(row)

    def dump(self, path: str | Path) -> None:
        """Write `lines` to a file."""
        Path(path).write_text("".join(line + "\n" for line in self.lines()), encoding="utf-8")

    def _move(self, entry: Entry, state: str, error: str = "") -> None:
        with self._lock:
            if entry.state in _FINAL:
                return  # an abort and an end may come at the same moment: the first counts
            now_s = self._clock() - self._began
            entry.state, entry.error = state, error
            if state == "running":
                entry.started_s = now_s
            else:
                entry.ended_s = now_s
        if log.isEnabledFor(TRACE):
            about = f"#{entry.header.seq} {entry.header.text()}"
            took = "" if entry.started_s is None or state == "running" else f" {now_s - entry.started_s:.6f} s"
            log.log(TRACE, "rank %d, group %s: %s %s%s", self.rank, self.group, about, state, took)
