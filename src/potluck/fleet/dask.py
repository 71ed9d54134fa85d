"""The fleet of a Dask cluster: every worker is a machine. Dask carries requests and logs, never a tensor.

Requests are functions that run in the worker's process, beside its tasks: a guest takes no thread of the worker
from Dask. The driver polls each guest every second; see kept.py for what happens without.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck._version import __version__
from potluck.errors import MachineError
from potluck.fleet import kept, sealed
from potluck.fleet.interface import GuestEnd, GuestSettings
from potluck.fleet.local import end_words
from potluck.fleet.remote import redacted

if TYPE_CHECKING:
    from distributed import Client

POLL_S = 1.0
ANSWER_S = 8.0
"""A worker that does not answer for so long is lost."""
_INSTALL = "in the environment of every worker, the version that is here: pip install 'potluck[dask]'"


class DaskGuest:
    """One guest on a worker."""

    def __init__(self, ask: Callable[..., Any], machine: str, log: Path) -> None:
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


class DaskFleet:
    """The workers of a Dask cluster, by their names. Safe to use from any thread."""

    def __init__(self, client: Client) -> None:
        """`client`: a synchronous one. Each machine should have one worker."""
        sealed.need_library("dask")
        self._client, self._id = client, uuid.uuid4().hex
        self._guests: list[DaskGuest] = []

    def machines(self) -> Sequence[str]:
        return tuple(self.workers())

    def workers(self) -> dict[str, str]:
        """The workers' addresses by their names."""
        found = self._client.scheduler_info()["workers"]
        return {str(worker["name"]): address for address, worker in found.items()}

    def ask(self, machine: str, function: Callable[..., Any], *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Run a function in a worker's process; MachineError if it cannot be run, or takes too long."""
        address = self.workers().get(machine)
        if address is None:
            raise MachineError(f"the Dask cluster has no worker {machine!r}", hint="has it ended?")
        run = self._client._run  # Client.run, with a deadline
        try:
            answers = self._client.sync(run, function, *arguments, workers=[address], callback_timeout=timeout_s)
            return answers[address]
        except ModuleNotFoundError as error:
            raise MachineError(f"{machine} has no {error.name}", hint=_INSTALL) from None
        except (OSError, TimeoutError, KeyError, ValueError) as error:
            words = str(error) or type(error).__name__
            raise MachineError(f"{machine} does not answer: {words}", hint="is its worker alive?") from None

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> DaskGuest:
        version, public = self.ask(machine, kept.hello, self._id)
        if version != __version__:
            raise MachineError(f"{machine} has Potluck {version}, and this is {__version__}", hint=_INSTALL)
        if settings.threads is None:  # torch would take one: Dask sets OMP_NUM_THREADS=1 in its workers
            settings = replace(settings, threads=self.ask(machine, _threads))
        log.touch()
        guest = DaskGuest(lambda what, *more: self.ask(machine, what, self._id, *more), machine, log)
        self.ask(machine, kept.start, self._id, guest.id, sealed.seal(token, public), settings)
        self._guests.append(guest)
        threading.Thread(target=guest.follow, name=f"potluck-{settings.name}", daemon=True).start()
        return guest

    def close(self) -> None:
        ending = [threading.Thread(target=guest.end, name="potluck-end") for guest in self._guests]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()
        self._guests.clear()


def _threads(dask_worker: Any) -> int:
    """Of a worker: Dask passes it to a function with a parameter of this name."""
    return int(dask_worker.state.nthreads)
