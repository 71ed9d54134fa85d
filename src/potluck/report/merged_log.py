"""One log of many machines: shows the lines of their files as they come, each with its machine's name."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

from potluck.report.line import Line
from potluck.report.screen import show

POLL_S = 0.05
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")
_MOST_LINE = 2000
"""Characters of a line that are shown; the file has all of it."""


class MergedLog:
    """Follows a folder of `<machine>.log` files and shows their lines on a stream as they come."""

    def __init__(self, folder: Path, names: Sequence[str], stream: TextIO, only: Collection[str] = ()) -> None:
        """`only`: machines whose lines are shown; all if empty. The files are made here."""
        self.folder, self._names, self._stream, self._only = folder, list(names), stream, only
        self._width = min(max(map(len, names), default=0), 24)
        self._read = dict.fromkeys(names, 0)
        self._rest = dict.fromkeys(names, b"")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._kept: Path | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / f"{name}.log").touch()
        self._thread = threading.Thread(target=self._follow, name="potluck-merged-log", daemon=True)
        self._thread.start()

    def add(self, name: str) -> None:
        """Follow one more machine. Does nothing if it is known."""
        with self._lock:
            if name in self._names:
                return
            (self.folder / f"{name}.log").touch()
            self._read[name], self._rest[name] = 0, b""
            self._names.append(name)
            self._width = min(max(self._width, len(name)), 24)
            if self._kept is not None:
                self._link(name)

    def keep_in(self, folder: Path) -> None:
        """Keep the files in this folder, as additional names of the same files, because other processes continue to
        write to them."""
        folder.mkdir(parents=True, exist_ok=True)
        self._kept = folder
        with self._lock:
            for name in self._names:
                self._link(name)

    def _link(self, name: str) -> None:
        assert self._kept is not None
        target = self._kept / f"{name}.log"
        target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a file system without links: they are copied at the end
            os.link(self.folder / f"{name}.log", target)

    def show(self, name: str, words: str) -> None:
        """Show a line that is in no file, for a machine or for none."""
        with self._lock:
            self._show([self._line(name, words)])

    def close(self) -> Path:
        """Show the remaining lines. Returns the folder of the files: the one in which they are kept, if it still
        exists."""
        self._stop.set()
        self._thread.join()
        self._look(last=True)
        if self._kept is not None and self._kept.is_dir():
            for name in self._names:
                if not (self._kept / f"{name}.log").exists():
                    shutil.copyfile(self.folder / f"{name}.log", self._kept / f"{name}.log")
            shutil.rmtree(self.folder, ignore_errors=True)
            return self._kept
        if not any(self._read.values()):
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.folder

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self, *, last: bool = False) -> None:
        with self._lock:
            for name in self._names:
                with open(self.folder / f"{name}.log", "rb") as file:
                    file.seek(self._read[name])
                    new = file.read()
                self._read[name] += len(new)
                *lines, self._rest[name] = (self._rest[name] + new).split(b"\n")
                if last and self._rest[name]:
                    lines.append(self._rest[name])
                if lines and (not self._only or name in self._only):
                    self._show([self._line(name, line.decode(errors="replace")) for line in lines])

    def _show(self, lines: list[Line]) -> None:
        # Nobody may read any more; the files are complete all the same.
        with contextlib.suppress(OSError, ValueError):
            show(lines, self._stream)
            self._stream.flush()

    def _line(self, name: str, words: str) -> Line:
        colour = COLOURS[self._names.index(name) % len(COLOURS)] if name in self._names else "bold"
        return Line().cell(name or "up", self._width, colour).add(" │ ", "dim").add(_shown(words))


def _shown(words: str) -> str:
    """The line without control characters; its indentation stays."""
    return "".join(c if c.isprintable() else " " for c in words.rstrip().expandtabs()[:_MOST_LINE])
