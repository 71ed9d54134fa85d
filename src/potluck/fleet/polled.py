"""A guest on a machine of a cluster engine, as its driver sees it: polled for its output and its end."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from potluck.errors import MachineError
from potluck.fleet import kept
from potluck.fleet.interface import GuestEnd
from potluck.fleet.local import end_words
from potluck.fleet.remote import redacted

POLL_S = 1.0


class PolledGuest:
    """One guest that `kept.py` keeps for this fleet in a process of a cluster engine."""

    def __init__(self, ask: Callable[..., Any], machine: str, log: Path) -> None:
        """`ask` calls a function of kept.py there, the fleet's id first; it raises MachineError."""
        self.id = uuid.uuid4().hex
        self._ask, self._machine, self._log = ask, machine, log
        self._offset, self._lock = 0, threading.Lock()
        self._over, self._end = threading.Event(), GuestEnd(None, "")

    def wait(self, timeout_s: float) -> GuestEnd | None:
        return self._end if self._over.wait(max(0.0, timeout_s)) else None

    def end(self, patience_s: float = 2.0) -> GuestEnd:
        if not self._over.is_set():
            with contextlib.suppress(MachineError):
                self._ask(kept.end, self.id, patience_s)
            self._poll()
        return self.wait(patience_s) or GuestEnd(None, "it does not answer")

    def follow(self) -> None:
        """Poll until it has ended."""
        while not self._over.wait(POLL_S):
            self._poll()

    def follow_in_thread(self, name: str) -> None:
        threading.Thread(target=self.follow, name=f"potluck-{name}", daemon=True).start()

    def _poll(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            try:
                answer = self._ask(kept.poll, self.id, self._offset)
            except MachineError as error:
                return self._ended(GuestEnd(None, error.what))
            if answer is None:
                return self._ended(GuestEnd(None, f"{self._machine} was restarted, and its guest ended"))
            text, status = answer
            whole = text if status is not None else text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(redacted(whole.decode(errors="replace")))
            if status is not None:
                self._ended(GuestEnd(status, end_words(status, self._log)))

    def _ended(self, end: GuestEnd) -> None:
        self._end = end
        self._over.set()


def end_all(guests: Iterable[PolledGuest]) -> None:
    """End them at the same time."""
    ending = [threading.Thread(target=guest.end, name="potluck-end") for guest in guests]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()
