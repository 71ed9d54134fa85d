"""Guests of a sweep: each idle machine joins its assigned trial, and leaves it when the assignment changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from potluck.errors import PotluckError
from potluck.fleet.interface import GuestFleet, GuestSettings

LOOK_S = 0.2
AGAIN_S = 5.0
"""Pause after a guest could not be started or failed."""


class Helpers:
    """One thread for each machine that has helped, which starts and ends its guest."""

    def __init__(self, fleet: GuestFleet, logs: Path, tell: Callable[[str], None]) -> None:
        self._fleet, self._logs, self._tell = fleet, logs, tell
        self._wanted: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._news = threading.Condition()
        self._over = False
        self.busy: dict[str, str] = {}
        """The trial of each machine whose guest runs."""

    def assign(self, wanted: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """Let each machine help its trial; machines that are not named stop helping."""
        with self._news:
            self._wanted, self._tokens = dict(wanted), dict(tokens)
            for machine in wanted:
                if machine not in self._threads:
                    name = f"potluck-helper-{machine}"
                    thread = threading.Thread(target=self._tend, args=(machine,), name=name, daemon=True)
                    self._threads[machine] = thread
                    thread.start()
            self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self._over, self._wanted = True, {}
            self._news.notify_all()
        for thread in self._threads.values():
            thread.join()

    def _tend(self, machine: str) -> None:
        over = ""
        while not self._over:
            with self._news:
                trial = self._wanted.get(machine, "")
                token = self._tokens.get(trial, "")
                if not token or token == over:
                    self._news.wait(LOOK_S)
                    continue
            if self._help(machine, trial, token):
                # Where the trial is over, it is so before anybody has said so here.
                over = token if self._wanted.get(machine) == trial else ""
            else:
                with self._news:
                    self._news.wait_for(lambda: self._over, AGAIN_S)

    def _help(self, machine: str, trial: str, token: str) -> bool:
        """Run a guest of the trial until it ends or the machine is needed elsewhere. Returns False if that
        failed."""
        try:
            guest = self._fleet.start(
                machine, token, GuestSettings(name=machine), self._logs / f"guest-{machine}.log"
            )
        except PotluckError as error:
            self._tell(f"{machine} cannot help {trial}: {error.what}")
            return False
        self.busy[machine] = trial
        self._tell(f"{machine} helps {trial}")
        try:
            while (ended := guest.wait(LOOK_S)) is None:
                if self._wanted.get(machine) != trial:
                    guest.end()
                    return True
        finally:
            del self.busy[machine]
        return ended.status == 0
