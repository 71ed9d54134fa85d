"""Records when this process computed: one JSON line for each interval, in the file that POTLUCK_TRACE names.

    {"start":812.40,"end":812.95,"samples":4}

Times are seconds of `time.monotonic()`, which all processes of one Linux machine share. A micro-batch that waited
for the network is several intervals; its samples are in the last one, so that they add up.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from potluck.errors import ConfigError
from potluck.spec.outcome import TracedInterval

SHORTEST_WAIT_S = 1e-4
"""A shorter wait does not split an interval: the layers of a model ask for their weights one by one."""


class Trace:
    """Used by one training thread. An unfinished interval is not written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_s: float | None = None
        self._samples = 0
        try:
            # Without a buffer: each line is in the file when write() returns, whatever becomes of the process.
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        except OSError as error:
            raise self._failed(error) from error

    def begin(self, samples: int) -> None:
        """A micro-batch of this many samples starts now."""
        self._start_s, self._samples = time.monotonic(), samples

    def waited(self, seconds: float) -> None:
        """This many of the last seconds were not spent computing."""
        if self._start_s is None or seconds < SHORTEST_WAIT_S:
            return
        now_s = time.monotonic()
        self.interval(self._start_s, now_s - seconds, 0)
        self._start_s = now_s

    def end(self) -> None:
        """The micro-batch is computed."""
        if self._start_s is not None:
            self.interval(self._start_s, time.monotonic(), self._samples)
            self._start_s = None

    def interval(self, start_s: float, end_s: float, samples: int) -> None:
        """A micro-batch was computed between these times."""
        made = TracedInterval(start=round(start_s, 6), end=round(max(start_s, end_s), 6), samples=samples)
        try:
            os.write(self._file, msgspec.json.encode(made) + b"\n")
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        os.close(self._file)

    def _failed(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write the trace {self._path}: {error.strerror or error}",
            hint="POTLUCK_TRACE must name a file that can be written; unset it to trace nothing",
        )
