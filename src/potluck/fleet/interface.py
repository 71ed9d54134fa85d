"""The interface of a fleet: a set of machines on which guests can be started.

`local`, `ssh` and the adapters of cluster engines implement it; one conformance test runs against all of them. A
fleet never carries tensors: a guest opens its own connections to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSettings:
    """The settings of a guest besides its token; None: it decides itself."""

    name: str
    """Its name in the run's logs and tables."""
    device: str | None = None
    threads: int | None = None
    micro_batch: int | None = None
    records: Path | None = None
    """Folder for flight records, on the guest's machine."""

    def words(self) -> list[str]:
        """Arguments for `python`. The token is the first line on stdin; stdin stays open while the guest may live.

        The process that starts it appends `--parent PID` with its own number.
        """
        words = ["-m", "potluck", "join", "--token-file", "-", "--view", "plain", "--name", self.name]
        for flag in ("device", "threads", "micro_batch"):
            if getattr(self, flag) is not None:
                words += [f"--{flag.replace('_', '-')}", str(getattr(self, flag))]
        return words + (["--runs", str(self.records)] if self.records is not None else [])


@dataclass(frozen=True, slots=True)
class GuestEnd:
    """How a guest ended."""

    status: int | None
    """Exit status, negative for a signal; None if the machine was lost before that was known."""
    why: str
    """The reason; empty if it ended well."""


class StartedGuest(Protocol):
    """One guest, from its start to its end. Safe to use from any thread."""

    def feed(self, text: str) -> None:
        """Write to its stdin: the token and a newline, if it was started without."""

    def end(self, patience_s: float = 2.0) -> GuestEnd:
        """Ask it to leave, kill it after `patience_s`, and return how it ended. Does nothing if it has ended."""

    def wait(self, timeout_s: float) -> GuestEnd | None:
        """How it ended; None if it still runs after `timeout_s`."""


class GuestFleet(Protocol):
    """Machines on which guests can be started."""

    def machines(self) -> Sequence[str]:
        """Names of the machines, without a check that they can be reached."""

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> StartedGuest:
        """Start a guest on a machine; returns once its process runs there. With an empty token it imports torch
        and waits for `feed`.

        The token is in no command line, environment, file or log, on either machine. The guest's output is appended
        to `log`. The guest ends within 10 s if this process dies in any way, or if the connection to the machine is
        lost.

        Raises:
            PotluckError: it cannot be started there, with the reason and the fix.
        """

    def close(self) -> None:
        """End all guests and disconnect from the machines. A second call does nothing."""
