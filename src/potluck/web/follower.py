"""Follows a run's growing events.jsonl, and folds its events into the page's state."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path

import msgspec

from potluck.spec.events import RunEvent, StepEnded, from_json
from potluck.web.state import PageState

AT_ONCE = 1 << 20
"""Bytes read in one turn; other work is done between two turns."""


class Follower:
    """`read` folds the new events; `state` is the page's state so far."""

    def __init__(self, path: Path, make: Callable[[], PageState], before: int = 0) -> None:
        """`before`: number of bytes in the log from earlier processes of a resumed run."""
        self._path, self._make, self._before = path, make, before
        self._file: FileIO | None = None
        self._undone: set[int] = set()
        """Numbers of the lines with steps that a resumed run repeated."""
        self._begin()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self.state = self._make()
        self._line, self._half, self._at = 0, b"", 0
        self._steps: list[tuple[int, int]] = []
        """Steps that count, with their lines."""
        if self._file is not None:
            self._file.seek(0)

    def read(self) -> int:
        """Returns the number of bytes read: at most `AT_ONCE`, and 0 if there is nothing new."""
        try:
            self._file = self._file or self._path.open("rb", buffering=0)
            left = self._before - self._at
            data = self._file.read(min(AT_ONCE, left) if left > 0 else AT_ONCE) or b""
        except OSError:
            return 0
        if not data:
            return 0
        self._at += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            self._line += 1
            event = _event(line)
            if event is None:
                continue
            if self._line in self._undone:
                self.state.pass_over(event)
                continue
            last = self.state.undone_after(event)
            if last is not None:  # a resumed run: read all again, without the steps that it repeats
                self._undone |= {line for step, line in self._steps if step > last}
                self._begin()
                return len(data)
            if isinstance(event, StepEnded):
                self._steps.append((event.step, self._line))
            self.state.fold(event)
        if left == len(data):
            self.state.resume()
        return len(data)


def _event(line: bytes) -> RunEvent | None:
    """None for a line that is no event of this version: the page shows the others."""
    try:
        return from_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
