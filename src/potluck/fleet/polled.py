"""Guests on machines of a cluster engine, from the driver's view: polled for their output and their end."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck._version import __version__
from potluck.errors import MachineError
from potluck.fleet import kept, sealed
from potluck.fleet.interface import GuestEnd, GuestSettings
from potluck.fleet.local import end_words
from potluck.fleet.remote import redacted

POLL_S = 1.0
ANSWER_S = 8.0
"""A process there that does not answer for this long is lost."""


class PolledGuest:
    """One guest that `kept.py` keeps for this fleet in a process of a cluster engine."""

    def __init__(self, ask: Callable[..., Any], machine: str, log: Path, public: bytes) -> None:
        """`ask` calls a function of kept.py there, the fleet's id first; it raises MachineError. `public`: for what
        `feed` sends."""
        self.id = uuid.uuid4().hex
        self._ask, self._machine, self._log, self._public = ask, machine, log, public
        self._offset, self._lock = 0, threading.Lock()
        self._over, self._end = threading.Event(), GuestEnd(None, "")

    def wait(self, timeout_s: float) -> GuestEnd | None:
        return self._end if self._over.wait(max(0.0, timeout_s)) else None

    def feed(self, text: str) -> None:
        self._ask(kept.feed, self.id, sealed.seal(text, self._public))

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


class PolledGuests:
    """The guests of one fleet."""

    def __init__(self) -> None:
        self._guests: list[PolledGuest] = []

    def start(
        self, ask: Callable[..., Any], machine: str, token: str, settings: GuestSettings, log: Path, install: str
    ) -> PolledGuest:
        """As in the interface; `ask` as for `PolledGuest`. `install`: the hint if another version of Potluck is
        installed there."""
        version, public = ask(kept.hello)
        if version != __version__:
            raise MachineError(f"{machine} has Potluck {version}, and this is {__version__}", hint=install)
        log.touch()
        guest = PolledGuest(ask, machine, log, public)
        ask(kept.start, guest.id, sealed.seal(token, public) if token else b"", settings)
        self._guests.append(guest)
        guest.follow_in_thread(settings.name)
        return guest

    def end(self) -> None:
        """End all of them in parallel, and wait for it."""
        ending = [threading.Thread(target=guest.end, name="potluck-end") for guest in self._guests]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()
        self._guests.clear()
