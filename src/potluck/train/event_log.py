"""The run's log: writes each event as one JSON line, passes it to the view, and reads a log back.

Neither the file nor the view can end a run. A full disk is reported once, and the log says how many lines are
missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from potluck.errors import RunFolderError
from potluck.failpoints import hit
from potluck.sinks import guarded, to_stderr
from potluck.spec.events import LogFailed, LogGap, RunEvent, from_json, to_json


class View(Protocol):
    """Shows events; both methods may be called from any thread."""

    def event(self, event: RunEvent) -> None:
        """Show one event, cheaply: this runs beside training."""

    def close(self) -> None:
        """Leave the terminal as it was; events that come later are ignored."""


class EventLog:
    """The log of one process. Any thread may emit; lines are written whole and in order."""

    def __init__(
        self, path: Path | None, show: Callable[[RunEvent], None] | None = None, *, shows_steps: bool = True
    ) -> None:
        """`shows_steps`: False if `show` ignores `step` events."""
        self.takes_steps = path is not None or (show is not None and shows_steps)
        """Whether anything uses the figures of steps: a plain script's run has neither file nor view."""
        self._lock = threading.Lock()
        self._path = path
        self._file = _opened(path) if path is not None else None
        self._show = guarded(show, "the view") if show is not None else None
        self._missing = 0
        """Lines that could not be written since the last successful one."""
        self._warned = False
        self.started = time.monotonic()
        """The clock at t_s = 0."""

    def emit(self, event: RunEvent) -> None:
        """Write the event, with its time, and show it."""
        stamped: RunEvent = msgspec.structs.replace(event, t_s=round(time.monotonic() - self.started, 4))
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

    def _write(self, file: io.FileIO, event: RunEvent) -> None:
        try:
            line = to_json(event) + b"\n"
            if self._missing:
                assert self._path is not None
                gap = to_json(LogGap(t_s=event.t_s, lines=self._missing)) + b"\n"
                half = file.tell() and not _ends_in_a_line(self._path)
                line = (b"\n" if half else b"") + gap + line
            hit("events.before-line")
            _write_all(file, line)
            self._missing = 0
            hit("events.after-line")
        except Exception as error:
            self._missing += 1
            if not self._warned:
                self._warned = True
                self._warn(getattr(error, "strerror", None) or str(error) or type(error).__name__)

    def _warn(self, reason: str) -> None:
        if self._show is None:
            to_stderr(f"cannot write to {self._path}: {reason}; the run continues")
            return
        self._show(LogFailed(path=str(self._path), reason=reason))


def events_in(path: Path) -> list[RunEvent]:
    """A log's events in order.

    Lines that are not JSON are skipped: a killed process leaves half a line, and the next one begins a new line. So
    are kinds that this version does not know. A known kind with a missing or wrong field is an error.
    """
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = from_json(line)
            except msgspec.ValidationError as error:
                raise RunFolderError(
                    f"{path}, line {number} is not an event of this version: {error}",
                    hint="read it with the version that wrote it (manifest.json names it), or remove the line",
                ) from None
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if event is not None:
                found.append(event)
    return found


def _opened(path: Path) -> io.FileIO:
    """The log, opened for appending. Unbuffered: a line is one write, and a failed one is not repeated on close."""
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
        hint="check that you may write there and that the disk is not full; continue with --resume",
    )
