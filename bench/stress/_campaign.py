"""What the campaign's scripts have in common: their arguments, their loop, and the line they print.

It must not know what is tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _forks import Trouble, import_everything

SHOWN_TROUBLES = 20


@dataclass
class Campaign:
    """One row of the campaign's table: tried so often, and what came out."""

    row: str
    what: str
    times: int
    minutes: float
    seed: int
    as_json: bool
    options: argparse.Namespace
    done: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self.began > 60 * self.minutes

    def add(self, **figures: int) -> None:
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0) + value

    def most(self, **figures: float) -> None:
        for name, value in figures.items():
            self.figures[name] = max(self.figures.get(name, value), value)

    def run(self, attempt: Callable[[int, Path, random.Random], int | None]) -> None:
        """Try until it was done `times` times, or Ctrl-C; an attempt may say how many times it was (1)."""
        with contextlib.suppress(KeyboardInterrupt):
            self._try(attempt)

    def _try(self, attempt: Callable[[int, Path, random.Random], int | None]) -> None:
        number = 0
        while self.done < self.times and not self.time_is_up:
            with tempfile.TemporaryDirectory(prefix="potluck-stress-", ignore_cleanup_errors=True) as folder:
                try:
                    counted = attempt(number, Path(folder), random.Random(self.seed * 1_000_003 + number))
                    self.done += 1 if counted is None else counted
                except Trouble as trouble:
                    self.done += 1
                    self.troubles.append(f"attempt {number}: {trouble}")
                    self._say(f"{self.row} attempt {number}: {trouble}")
            number += 1
            if number % 10 == 0:
                self._say(f"{self.row}: {self.done} of {self.times}, {len(self.troubles)} bad, {self.figures}")

    def end(self) -> int:
        """Print the line; the exit status."""
        line = {
            "row": self.row,
            "what": self.what,
            "times": self.done,
            "wanted": self.times,
            "bad": len(self.troubles),
            **self.figures,
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.began, 1),
            "minutes": self.minutes,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        if self.as_json:
            print(json.dumps({**line, "troubles": self.troubles[:SHOWN_TROUBLES]}))
        else:
            print("  ".join(f"{name} {value}" for name, value in line.items()))
        return 1 if self.troubles or not self.done else 0

    def _say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)


def begin(
    row: str, what: str, *, times: int, minutes: float, more: Callable[[Any], None] | None = None
) -> Campaign:
    """Parse the arguments that every script has."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--times", type=int, default=times)
    parser.add_argument("--minutes", type=float, default=minutes, help="stop after so long, however often that was")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is random here")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    if more is not None:
        more(parser)
    options = parser.parse_args()
    # A shell's background jobs ignore Ctrl-C, and whatever they start would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is counted so far is printed
    import_everything()
    return Campaign(row, what, options.times, options.minutes, options.seed, options.json, options)
