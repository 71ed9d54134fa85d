"""The fleet of this machine alone: guests are child processes that never outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from potluck.fleet.interface import GuestEnd, GuestSettings
from potluck.spec.config import RunConfig

HERE = "here"
HOSTS_OWN = ("POTLUCK_TOKEN", "POTLUCK_TRACE", "POTLUCK_FAILPOINT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that apply to the host's process, not to its guests."""


class LocalGuest:
    """One guest process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def wait(self, timeout_s: float) -> GuestEnd | None:
        try:
            status = self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None
        return GuestEnd(status, end_words(status, self._log))

    def feed(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it has ended already, or is ending: `wait` says how

    def let_go(self) -> None:
        """Close its stdin, which it treats as the end of this process, and leaves."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, patience_s: float = 2.0) -> GuestEnd:
        self.let_go()
        ended = self.wait(patience_s)
        if ended is None:
            self._process.kill()
            ended = self.wait(10.0)
        return ended or GuestEnd(None, "it does not end")


class LocalFleet:
    """Starts guests on this machine."""

    def __init__(self) -> None:
        self._guests: list[LocalGuest] = []

    def machines(self) -> Sequence[str]:
        return (HERE,)

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> LocalGuest:
        environment = {name: value for name, value in os.environ.items() if name not in HOSTS_OWN}
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, *settings.words(), "--parent", str(os.getpid())],
                env=environment,
                # Held open: that this end is gone tells the guest that the host is, however it went.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the host: it saves first and then sends its guests home.
                start_new_session=os.name == "posix",
            )
        guest = LocalGuest(process, log)
        self._guests.append(guest)
        if token:
            guest.feed(token + "\n")
        return guest

    def close(self) -> None:
        for guest in self._guests:
            guest.let_go()
        deadline = time.monotonic() + 2.0
        for guest in self._guests:
            guest.end(deadline - time.monotonic())
        self._guests.clear()


class LocalGuests:
    """The guests of `--guests N`: started together, ended together; their output is in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fleet = LocalFleet()
        self._guests: dict[str, LocalGuest] = {}

    def start(self, count: int, *, token: str, threads: int, config: RunConfig) -> None:
        for number in range(1, count + 1):
            settings = GuestSettings(
                name=f"guest-{number}",
                device=config.device,
                threads=threads,
                micro_batch=config.micro_batch,
                records=self._folder,
            )
            log = self._folder / f"{settings.name}.log"
            log.unlink(missing_ok=True)  # of the run that is resumed
            self._guests[settings.name] = self._fleet.start(HERE, token, settings, log)

    def close(self, patience_s: float = 5.0) -> list[str]:
        """Wait until they have left, and kill the others. Returns a sentence about each that failed."""
        began = time.monotonic()
        failed = []
        for name, guest in self._guests.items():
            ended = guest.wait(max(0.1, began + patience_s / 3 - time.monotonic()))
            guest.let_go()
            if ended is None:
                # It never got in, or was not told that the run is over: now it sees that this end is closed.
                guest.end(max(0.1, began + patience_s - time.monotonic()))
            elif ended.status:
                failed.append(f"{name} {ended.why} (see {self._folder / f'{name}.log'})")
        self._guests.clear()
        return failed


def end_words(status: int, log: Path) -> str:
    """Why a process ended with this status: the last lines of its log."""
    if not status:
        return ""
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]) if log.exists() else ""
    return f"{how}: {tail}" if tail else how
