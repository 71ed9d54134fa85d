"""The flight recorder: the last few hundred messages and events of a machine, written to a file after a fault.

It keeps the kind, the numbers and the size of each message, and the reason and address of each event of the run's
log. It never keeps tensors, and no text of a message except its kind. Equal messages in a row are one entry:
otherwise the pieces of one gradient would fill the record. `spec/flight_record.py` has the lines of the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from potluck.spec.events import (
    GuestLeft,
    GuestLost,
    GuestRefused,
    LeaseTakenBack,
    ReplicaMismatch,
    RunEvent,
    kind_of,
)
from potluck.spec.flight_record import Direction, FlightEntry, FlightHead
from potluck.spec.messages import Message

ENTRIES = 500
MOST_FILES = 6
"""Files of one machine in one folder; the oldest are removed."""
TOGETHER_S = 1.0
"""Equal messages within this time are one entry."""
PAUSE_S = 5.0
"""Seconds between two files. Faults often come together; the second file then covers both."""
NUMBERS = ("lease", "check", "step", "version", "base", "piece", "batch", "count", "keep", "computed", "samples")
ABOUT = ("lease", "version")
"""Messages that differ in one of these are never one entry."""
LONGEST_TEXT = 300
MOST_MACHINES = 256


@dataclass(slots=True)
class _Entry:
    began: float
    until: float
    direction: Direction
    machine: str
    kind: str
    numbers: dict[str, int]
    nbytes: int = 0
    times: int = 1
    words: dict[str, str] = field(default_factory=dict)

    about: Any = None
    """The lease or version that a message is about."""

    def line(self, started: float) -> FlightEntry:
        about: dict[str, Any] = {**self.numbers, **self.words}
        return FlightEntry(
            t_s=round(self.began - started, 4),
            dir=self.direction,
            machine=self.machine,
            kind=self.kind,
            bytes=self.nbytes,
            times=self.times,
            until_s=round(self.until - started, 4) if self.times > 1 else None,
            **about,
        )


def _nothing(message: Message) -> tuple[int, ...]:
    return ()


def _getter(names: tuple[str, ...]) -> Callable[[Message], tuple[int, ...]]:
    if not names:
        return _nothing
    if len(names) == 1:
        name = names[0]
        return lambda message: (getattr(message, name),)
    return attrgetter(*names)


@functools.cache
def _kept(kind: type[Message]) -> tuple[tuple[str, ...], Callable[[Message], Any], Callable[[Message], Any]]:
    """Which numbers of a kind of message are kept, and how to read them and its subject."""
    names = tuple(name for name in NUMBERS if name in kind.__struct_fields__)
    return names, _getter(names), _getter(tuple(name for name in ABOUT if name in names))


def _is_fault(event: RunEvent) -> bool:
    """Whether the event means that a machine has failed."""
    match event:
        case GuestLost() | GuestRefused() | ReplicaMismatch():
            return True
        case LeaseTakenBack(silent=failed) | GuestLeft(failed=failed):
            return failed
    return False


def remove_old(name: str, folder: Path) -> None:
    """Remove all but this user's newest records of processes with this name, which have their number after it."""
    pattern, user, found = re.compile(re.escape(_stem(name)) + r"-\d+-\d+\.jsonl"), getattr(os, "getuid", int)(), []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # its process has just removed it
                if pattern.fullmatch(path.name) and (stat := path.lstat()).st_uid == user:
                    found.append((stat.st_mtime, path))
    for _, path in sorted(found)[:-MOST_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def _stem(name: str) -> str:
    return "flight-" + re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60]


class Recorder:
    """A bounded ring that any thread may write to; a message costs it a microsecond or two."""

    def __init__(
        self,
        name: str,
        folder: Path | None,
        *,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[Path, str], None] = lambda path, why: None,
    ) -> None:
        """If `folder` is None, nothing is written. `tell` is called with each file and the reason for it."""
        self.name = name
        self.tell = tell
        self.files = 0
        """Number of files written so far."""
        self._folder = folder
        self._clock = clock
        self._started = clock() if started is None else started
        self._lock = threading.Lock()
        self._ring: deque[_Entry] = deque(maxlen=ENTRIES)
        self._last: dict[tuple[str, str], _Entry] = {}
        self._fault: str | None = None
        self._paths: list[Path] = []
        self._written = float("-inf")

    # -- what happens -----------------------------------------------------------------------------------

    def message(self, direction: Direction, machine: str, message: Message, nbytes: int) -> None:
        """A message came "in" or went "out"; `machine` is the other one."""
        names, values_of, about_of = _kept(type(message))
        numbers = dict(zip(names, values_of(message)))
        about = about_of(message)
        now = self._clock()
        with self._lock:
            key = (direction, machine)
            last = self._last.get(key)
            if (
                last is not None
                and last.kind == message.kind
                and last.about == about
                and now - last.began < TOGETHER_S
            ):
                last.until, last.numbers = now, numbers
                last.nbytes += nbytes
                last.times += 1
                return
            if len(self._last) >= MOST_MACHINES:
                self._last.clear()
            entry = self._last[key] = _Entry(
                now, now, direction, machine, message.kind, numbers, nbytes, about=about
            )
            self._ring.append(entry)

    def event(self, event: RunEvent) -> None:
        """Record an event of the run's log. After a fault the record is written soon."""
        kind, machine = kind_of(event), str(getattr(event, "machine", None) or "")
        words = {k: str(v)[:LONGEST_TEXT] for k in ("address", "reason") if (v := getattr(event, k, None))}
        self.note(kind, machine, {k: getattr(event, k) for k in NUMBERS if hasattr(event, k)}, words)
        if _is_fault(event):
            self.fault(f"{kind} {machine}: {words.get('reason', '')}")

    def note(self, kind: str, machine: str, numbers: Mapping[str, object], words: Mapping[str, str]) -> None:
        """Record something other than a message, in this machine's own words."""
        now = self._clock()
        plain = {k: int(v) for k, v in numbers.items() if isinstance(v, int)}
        with self._lock:
            self._ring.append(_Entry(now, now, "event", machine or self.name, kind, plain, words=dict(words)))

    def fault(self, why: str) -> None:
        """The record will be written when `write` is next called."""
        with self._lock:
            self._fault = self._fault or why

    # -- files ------------------------------------------------------------------------------------------

    def write(self, *, now: bool = False) -> Path | None:
        """Write the record if there was a fault, at most every few seconds unless `now`. Returns its path.

        Errors such as a full disk are ignored, because the run is more important than the record.
        """
        if self._fault is None or self._folder is None:
            return None
        with self._lock:
            time_s = self._clock()
            if self._fault is None or (not now and time_s - self._written < PAUSE_S):
                return None
            why, self._fault, self._written = self._fault, None, time_s
            lines = [entry.line(self._started) for entry in self._ring]
        head = FlightHead(
            flight=self.name,
            why=why,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            t_s=round(time_s - self._started, 4),
            clock_s=self._started,
        )
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *lines))
        with contextlib.suppress(OSError):
            path = self._new_file(text)
            self.files += 1
            self._paths.append(path)
            self.tell(path, why)
            return path
        return None

    def discard(self) -> None:
        """The run ended well: remove the files written so far, and forget the pending fault."""
        with self._lock:
            self._fault = None
        while self._paths:
            with contextlib.suppress(OSError):
                self._paths.pop().unlink()

    def _new_file(self, text: bytes) -> Path:
        assert self._folder is not None
        stem = _stem(self.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max(self._numbers(stem), default=0) + 1
        path = self._folder / f"{stem}-{number}.jsonl"
        # A new file and nobody else's: the folder may be one that all users of the machine write to.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        for old in sorted(self._numbers(stem))[:-MOST_FILES]:
            with contextlib.suppress(OSError):
                (self._folder / f"{stem}-{old}.jsonl").unlink()
        return path

    def _numbers(self, stem: str) -> list[int]:
        assert self._folder is not None
        pattern = re.compile(re.escape(stem) + r"-(\d{1,9})\.jsonl")
        return [int(found[1]) for p in self._folder.iterdir() if (found := pattern.fullmatch(p.name))]
