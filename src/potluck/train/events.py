"""The run's log: every event one JSON line in the run folder, and the same event to whoever renders it.

Owns the file and the order of its lines. It knows nothing of what events mean. Neither the file nor whoever renders
can end a run: a disk that is full is told once, and where lines are missing the log says how many.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from potluck.errors import RunFolderError
from potluck.failpoints import hit
from potluck.sinks import guarded, to_stderr

Event = dict[str, Any]


class View(Protocol):
    """Shows events; both methods may be called from any thread."""

    def event(self, event: Event) -> None:
        """Show one event, cheaply: this runs beside training."""

    def close(self) -> None:
        """Leave the terminal as it was; events that come later are ignored."""


class EventLog:
    """Any thread may emit; lines come whole and in order."""

    def __init__(self, path: Path | None, show: Callable[[Event], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._file = _opened(path) if path is not None else None
        self._show = guarded(show, "the view") if show is not None else None
        self._missing = 0
        """Lines that could not be written since the last one that could."""
        self._warned = False
        self.started = time.monotonic()
        """The clock at t_s = 0."""

    def emit(self, event: Event) -> None:
        stamped = {"t_s": round(time.monotonic() - self.started, 4), **event}
        # JSON knows no NaN: a value that is not finite is null.
        stamped = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in stamped.items()}
        with self._lock:
            if self._file is not None:
                self._write(self._file, stamped)
            if self._show is not None:
                self._show(stamped)

    def sync(self) -> None:
        """Wait until everything emitted so far is on the disk, and would survive a power cut."""
        # Not under the lock: nobody should wait for the disk to emit.
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, file: io.FileIO, event: Event) -> None:
        try:
            text = json.dumps(event, default=str) + "\n"
            if self._missing:
                assert self._path is not None
                gap = {"t_s": event["t_s"], "event": "log_gap", "lines": self._missing}
                half = file.tell() and not _ends_in_a_line(self._path)
                text = ("\n" if half else "") + f"{json.dumps(gap)}\n{text}"
            hit("events.before-line")
            _write_all(file, text.encode())
            self._missing = 0
            hit("events.after-line")
        except Exception as error:
            self._missing += 1
            if not self._warned:
                self._warned = True
                self._warn(getattr(error, "strerror", None) or str(error) or type(error).__name__)

    def _warn(self, reason: str) -> None:
        if self._show is None:
            to_stderr(f"cannot write to {self._path}: {reason}; the run goes on")
            return
        self._show({"event": "log_failed", "path": str(self._path), "reason": reason})


def events_in(path: Path) -> list[Event]:
    """A log's events in order, without lines that are no event: a killed run may end in half a line."""
    found = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [event for event in found if isinstance(event, dict)]


def _opened(path: Path) -> io.FileIO:
    """The log, to be added to. Unbuffered: a line is one write, and a failed one is not tried again at the end."""
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        if file.tell() and not _ends_in_a_line(path):
            # A process that was killed, or a disk that was full, left half a line: it must not spoil the next.
            _write_all(file, b"\n")
    except OSError as error:
        raise _unwritable(path, error) from error
    return file


def _ends_in_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write to {path}: {error.strerror or error}",
        hint="check that you may write there and that the disk is not full; go on with --resume",
    )
