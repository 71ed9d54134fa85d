"""The page of a guest: a view that forwards everything to another view, and writes a log for the page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from potluck.spec.events import HostBack, HostGone, RunEvent
from potluck.train.event_log import EventLog
from potluck.train.guest_session import GuestObserver
from potluck.web.opening import WebPage, open_guest_page, place_of
from potluck.web.state import GuestAbout


class GuestPage:
    """Opens the page when the guest has joined, and shows its address."""

    def __init__(self, view: GuestObserver, where: str, tell: Callable[[str], None]) -> None:
        place_of(where)  # an error before the guest is in
        self._view, self._where, self._tell = view, where, tell
        self._folder = tempfile.TemporaryDirectory(prefix="potluck-web-", ignore_cleanup_errors=True)
        events = Path(self._folder.name) / "events.jsonl"
        self._log = EventLog(events)
        self._events = events
        self._page: WebPage | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def joined(self, *, host: str, address: str, run: str, name: str, device: str) -> None:
        self._view.joined(host=host, address=address, run=run, name=name, device=device)
        if self._page is None:
            about = GuestAbout(host=f"{host} ({address})", run=run, name=name, device=device.partition(" (")[0])
            self._page = open_guest_page(self._events, about, self._where)
            self._tell(self._page.url)

    def missing(self, seconds: float, give_up_s: float) -> None:
        self._log.emit(HostGone(seconds=round(seconds, 1)))
        self._view.missing(seconds, give_up_s)

    def found(self) -> None:
        self._log.emit(HostBack())
        self._view.found()

    def event(self, event: RunEvent) -> None:
        self._log.emit(event)
        self._view.event(event)

    def close(self) -> None:
        self._view.close()
        self._log.close()
        if self._page is not None:
            self._page.close()
        with suppress(OSError):
            self._folder.cleanup()
