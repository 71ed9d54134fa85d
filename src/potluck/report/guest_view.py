"""What a guest shows of its part in a run: who it serves, and what it has brought. It knows no protocol."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from potluck import units

EVERY_S = 2.0
"""Between two progress lines."""


class GuestView:
    """A few lines on a terminal or in a pipe."""

    def __init__(self, mode: str) -> None:
        self._json = mode == "json"
        self._quiet = mode == "quiet"
        self._in_place = mode in ("auto", "live") and sys.stdout.isatty()
        self._started = time.monotonic()
        self._last = 0.0
        self._samples = 0
        self._line = ""
        self._waited = False

    def waiting(self, error: Exception) -> None:
        """The host did not answer: say so once."""
        if not self._waited:
            self._waited = True
            self._say(f"no answer yet ({error}); trying again")

    def joined(self, *, host: str, address: str, run: str, name: str, device: str) -> None:
        self._say(f"joined run {run} of {host} ({address}) as {name}, on {device}")

    def runs(self, what: str) -> None:
        self._say(f"computing {what}; waiting for weights (Ctrl-C to leave)")

    def event(self, event: dict[str, Any]) -> None:
        if self._json:
            print(json.dumps(event), flush=True)
            return
        if event.get("event") != "delivered":
            return
        self._samples = int(event["total_samples"])
        now = time.monotonic()
        if now - self._last < EVERY_S and not self._in_place:
            return
        self._last = now
        rate = event["samples"] / event["compute_s"] if event["compute_s"] else 0.0
        line = (
            f"step {event['step']}: {event['samples']} samples at {rate:.2f}/s, loss {event['loss']:.4f}, "
            f"{self._samples} samples in {units.seconds_text(now - self._started)}"
        )
        if self._in_place:
            print("\r" + line.ljust(len(self._line)), end="", flush=True)
            self._line = line
        else:
            self._say(line)

    def ended(self, words: str) -> None:
        self._say(f"{words}; this machine brought {self._samples} samples")

    def close(self) -> None:
        pass

    def _say(self, line: str) -> None:
        if self._json or self._quiet:
            return
        if self._line:
            print()
            self._line = ""
        print(line, flush=True)
