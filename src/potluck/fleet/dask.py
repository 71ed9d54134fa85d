"""The fleet of a Dask cluster: every worker is a machine. Dask carries requests and logs, never a tensor.

Requests are functions that run in the worker's process, besides its tasks, so a guest uses none of Dask's task
threads. The driver polls each guest every second; kept.py says what happens otherwise.
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.errors import MachineError
from potluck.fleet import sealed
from potluck.fleet.cluster import ClusterRun, FleetRun
from potluck.fleet.interface import GuestSettings
from potluck.fleet.polled import ANSWER_S, PolledGuest, PolledGuests

if TYPE_CHECKING:
    from distributed import Client

_INSTALL = "in the environment of every worker, the version that is here: pip install -e '.[dask]'"


class DaskFleet:
    """The workers of a Dask cluster, by their names. Safe to use from any thread."""

    def __init__(self, client: Client) -> None:
        """`client`: a synchronous one. Each machine should have one worker."""
        sealed.need_library("dask")
        self._client, self._id = client, uuid.uuid4().hex
        self._guests = PolledGuests()

    def machines(self) -> Sequence[str]:
        return tuple(self.workers())

    def instances(self) -> dict[str, str]:
        return self.workers()

    def workers(self) -> dict[str, str]:
        """The workers' addresses by their names."""
        ask = self._client.scheduler_info
        # Some versions tell of 5 workers unless asked for all.
        every = {"n_workers": -1} if "n_workers" in inspect.signature(ask).parameters else {}
        found = ask(**every)["workers"]
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

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> PolledGuest:
        def ask(what: Callable[..., Any], *more: Any) -> Any:
            return self.ask(machine, what, self._id, *more)

        if settings.threads is None:  # torch would take one: Dask sets OMP_NUM_THREADS=1 in its workers
            settings = replace(settings, threads=self.ask(machine, _threads))
        return self._guests.start(ask, machine, token, settings, log, _INSTALL)

    def close(self) -> None:
        self._guests.end()


class DaskCluster:
    """A Dask cluster on which runs are started; see `potluck.dask`."""

    def __init__(self, client: Client) -> None:
        """`client`: a synchronous one. This machine hosts; every worker is a guest, also those added later."""
        self._client = client

    def start(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        runs: str | os.PathLike[str] = "runs",
        send: Sequence[str | os.PathLike[str]] = (),
    ) -> FleetRun:
        """Start a script as `potluck host` does. `options` and `send` are the host's; `runs` is a folder here."""
        words = [*options, *(word for file in send for word in ("--send", str(file)))]
        run = ClusterRun(DaskFleet(self._client), str(script), arguments, options=words, runs=Path(runs))
        return FleetRun(lambda what, *more: getattr(run, what)(*more))


def _threads(dask_worker: Any) -> int:
    """The worker; Dask passes it to a function with a parameter of this name."""
    return int(dask_worker.state.nthreads)
