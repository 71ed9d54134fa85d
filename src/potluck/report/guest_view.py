"""Shows a guest's part in a run: its host, its progress and its end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time

from potluck import units
from potluck.report.sentences import loss_text
from potluck.report.text import clean
from potluck.spec.events import Delivered, GuestEnded, HostBack, HostGone, HostPreparing, RunEvent, RunNote, to_json

EVERY_S = 2.0
"""Seconds between two progress lines."""
REMIND_S = 30.0
"""Seconds between two lines about a missing host."""


_MOST_TEXT = 2000


class GuestView:
    """A few lines on a terminal or in a pipe. Any thread may call. A closed terminal is no error here."""

    def __init__(self, mode: str) -> None:
        self._lock = threading.RLock()
        self._json = mode == "json"
        self._quiet = mode == "quiet"
        self._in_place = mode in ("auto", "live") and sys.stdout.isatty()
        self._started = time.monotonic()
        self._last = 0.0
        self._samples = self._dropped = 0
        self._line = ""
        self._waited = False
        self._reminded: float | None = None

    def waiting(self, error: Exception) -> None:
        """The host did not answer; printed once."""
        if not self._waited:
            self._waited = True
            self._say(f"no answer yet ({error}); trying again")

    def preparing(self, reason: str) -> None:
        """The host answers, but its script has not reached the training loop."""
        self._json_line(HostPreparing(reason=reason))
        self._say(f"connected; {reason}: waiting until it does (Ctrl-C to leave)")

    def joined(self, *, host: str, address: str, run: str, name: str, device: str) -> None:
        self._say(f"joined run {run} of {host} ({address}) as {name}, on {device}")

    def runs(self, what: str) -> None:
        self._say(f"computing {what}; waiting for weights (Ctrl-C to leave)")

    def missing(self, seconds: float, give_up_s: float) -> None:
        """The host has been silent for this long: shown in place every second, or as a line every half minute."""
        words = f"host gone, waiting ({seconds:.0f} s); leaves after {give_up_s:.0f} s, Ctrl-C to leave"
        with self._lock:
            if self._in_place:
                self._show_in_place(words)
            elif self._reminded is None or seconds - self._reminded >= REMIND_S:
                self._reminded = seconds
                self._json_line(HostGone(seconds=round(seconds, 1)))
                self._say(words)

    def found(self) -> None:
        with self._lock:
            self._reminded = None
            self._json_line(HostBack())
            self._say("the host is back")

    def recorded(self, path: object, why: str) -> None:
        self._say(f"{why}; for a bug report the last messages are in {path} (removed if the run ends well)")

    def event(self, event: RunEvent) -> None:
        with self._lock:
            self._event(event)

    def _event(self, event: RunEvent) -> None:
        if self._json:
            self._json_line(event)
            return
        if isinstance(event, RunNote):
            self._say(clean(event.text))
        if isinstance(event, GuestEnded):
            self._samples, self._dropped = event.samples, event.dropped
        if not isinstance(event, Delivered):
            return
        self._samples = event.total_samples
        now = time.monotonic()
        if now - self._last < EVERY_S and not self._in_place:
            return
        self._last = now
        rate = event.samples / event.compute_s if event.compute_s else None
        line = (
            f"step {event.step}: {event.samples} samples at {units.rate_text(rate)}, loss {loss_text(event.loss)}, "
            f"{self._samples} samples in {units.seconds_text(now - self._started)}"
        )
        if self._in_place:
            self._show_in_place(line)
        else:
            self._say(line)

    def ended(self, words: str) -> None:
        more = f" ({self._dropped} more came too late or did not count)" if self._dropped else ""
        self._say(f"{words}; this machine computed {self._samples} samples{more}")

    def close(self) -> None:
        pass

    def _json_line(self, event: RunEvent) -> None:
        if self._json:
            self._print(to_json(event).decode())

    def _show_in_place(self, line: str) -> None:
        line = line[: max(shutil.get_terminal_size().columns - 1, 20)]  # a wrapped one could not be taken back
        self._print("\r" + line.ljust(len(self._line)), end="")
        self._line = line

    def _say(self, line: str) -> None:
        if self._json or self._quiet:
            return
        line = clean(line, _MOST_TEXT)  # names and reasons come from the host
        with self._lock:
            if self._line:
                self._print("")
                self._line = ""
            self._print(line)

    def _print(self, text: str, end: str = "\n") -> None:
        # Where the output has no reader any more, the thread that watches the terminal ends this process in order.
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, flush=True)
