"""Keeps a fleet's guests in a long-lived process of a cluster engine, such as a Dask worker.

The fleet calls these functions there. Each call shows that the fleet is alive: after SILENT_S without one the
process ends the fleet's guests. So a killed driver, a killed scheduler and a pulled cable are handled in the same
way.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path

from potluck._version import __version__
from potluck.fleet.interface import GuestSettings
from potluck.fleet.local import HERE, LocalFleet, LocalGuest
from potluck.fleet.sealed import KeyPair

SILENT_S = 6.0
"""This and the time that guests need to leave must stay below 10 s."""

_kept: dict[str, KeptGuests] = {}
"""The guests of each fleet in this process."""


class KeptGuests:
    """The guests of one fleet."""

    def __init__(self, fleet: str) -> None:
        self.keys = KeyPair()
        self.fleet, self.guests = LocalFleet(), dict[str, LocalGuest]()
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-kept-"))
        self.heard = time.monotonic()
        threading.Thread(target=self._watch, args=(fleet,), name="potluck-kept", daemon=True).start()

    def _watch(self, fleet: str) -> None:
        while time.monotonic() - self.heard < SILENT_S:
            time.sleep(0.2)
        _kept.pop(fleet, None)
        self.fleet.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _no_polls(record: logging.LogRecord) -> bool:
    """Whether to write a line of Dask's log. Lines about the poll of every second are left out."""
    return record.args != ("poll",)


def hello(fleet: str) -> tuple[str, bytes]:
    """This Potluck's version, and the public key for encrypting tokens."""
    logging.getLogger("distributed.worker").addFilter(_no_polls)
    if fleet not in _kept:
        _kept[fleet] = KeptGuests(fleet)
    _kept[fleet].heard = time.monotonic()
    return __version__, _kept[fleet].keys.public


def start(fleet: str, guest: str, token: bytes, settings: GuestSettings) -> None:
    """Start a guest with an encrypted token; without one, it waits for `feed`."""
    kept = _kept[fleet]
    text = kept.keys.open(token) if token else ""
    kept.guests[guest] = kept.fleet.start(HERE, text, settings, kept.folder / guest)


def feed(fleet: str, guest: str, text: bytes) -> None:
    """Decrypt a text and write it to a guest's stdin."""
    if (kept := _kept.get(fleet)) is not None and guest in kept.guests:
        kept.guests[guest].feed(kept.keys.open(text))


def poll(fleet: str, guest: str, offset: int) -> tuple[bytes, int | None] | None:
    """The guest's output from `offset`, and its status if it has ended; None if it is unknown here."""
    if (kept := _kept.get(fleet)) is None or guest not in kept.guests:
        return None
    kept.heard = time.monotonic()
    ended = kept.guests[guest].wait(0.0)
    with open(kept.folder / guest, "rb") as log:
        log.seek(offset)
        return log.read(1 << 20), ended.status if ended else None


async def end(fleet: str, guest: str, patience_s: float) -> None:
    """End a guest, without blocking the other work of this process."""
    if (kept := _kept.get(fleet)) is not None and guest in kept.guests:
        await asyncio.to_thread(kept.guests[guest].end, patience_s)
