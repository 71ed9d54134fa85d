"""Follows a run's events.jsonl while it grows, and folds what it reads into the page's state."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path

import msgspec

from potluck.spec.events import RunEvent, from_json
from potluck.web.state import PageState

AT_ONCE = 1 << 20
"""Bytes read in one turn: other things are served between two turns."""


class _Head(msgspec.Struct):
    event: str
    step: int | None = None
    resumed_from: int | None = None


class Follower:
    """`read` folds what has been written since; `state` is the page's state so far."""

    def __init__(self, path: Path, make: Callable[[], PageState]) -> None:
        self._path, self._make = path, make
        self._file: FileIO | None = None
        self._begin()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self.state = self._make()
        self._undone = undone_lines(self._path)
        self._line, self._half = 0, b""
        if self._file is not None:
            self._file.seek(0)

    def read(self) -> int:
        """The number of bytes that were read: at most `AT_ONCE`, 0 where there is nothing new."""
        try:
            self._file = self._file or self._path.open("rb", buffering=0)
            data = self._file.read(AT_ONCE) or b""
        except OSError:
            return 0
        if not data:
            return 0
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            self._line += 1
            event = _event(line)
            if event is None:
                continue
            if self._line in self._undone:
                self.state.pass_over(event)
                continue
            if self.state.undone_by(event):
                self._begin()  # a resumed run: read all again, without the steps that it repeats
                return len(data)
            self.state.fold(event)
        return len(data)


def undone_lines(path: Path) -> set[int]:
    """Numbers of the lines with steps that a resumed run repeated."""
    undone: set[int] = set()
    steps: list[tuple[int, int]] = []
    decode = msgspec.json.Decoder(_Head).decode
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    head = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                last = None
                if head.event == "run_start" and head.resumed_from is not None:
                    last = head.resumed_from
                elif head.event == "step" and head.step is not None:
                    last = head.step - 1
                while last is not None and steps and steps[-1][0] > last:
                    undone.add(steps.pop()[1])
                if head.event == "step" and head.step is not None:
                    steps.append((head.step, number))
    except OSError:
        pass
    return undone


def _event(line: bytes) -> RunEvent | None:
    """None for what is no event of this version: the page goes on with the others."""
    try:
        return from_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
