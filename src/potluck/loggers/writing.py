"""Writes a run's events to its loggers, in a separate thread, so that no step waits for a disk or a network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from potluck.errors import MissingModuleError
from potluck.loggers.clients import Client, MlflowClient, TensorBoardClient, TrackioClient, WandbClient
from potluck.loggers.logged import params_of, scalars_of
from potluck.sinks import guarded
from potluck.spec.config import LoggerName
from potluck.spec.events import Logged, RunEvent, RunStarted, StepEnded
from potluck.spec.manifest import Manifest

CLIENTS: Mapping[LoggerName, type[TensorBoardClient | WandbClient | MlflowClient | TrackioClient]] = {
    "tensorboard": TensorBoardClient,
    "wandb": WandbClient,
    "mlflow": MlflowClient,
    "trackio": TrackioClient,
}

MOST_WAITING = 10_000
"""Events that wait for a slow or stuck logger; later ones are not written."""
CLOSE_S = 30.0
"""How long the end of a run waits for its loggers."""

Note = Callable[[str], None]
Open = Callable[[Path, Manifest, Note], "LoggerThread"]


def loggers(names: Sequence[LoggerName]) -> Open | None:
    """A function that opens these loggers for a run. Raises immediately if a library is missing, before the run
    begins."""
    classes = {name: CLIENTS[name] for name in names}
    for name, client in classes.items():
        try:
            client.import_library()
        except Exception as error:  # a broken installation raises anything
            raise MissingModuleError(
                f"--log {name} cannot be used: {error}", hint=f"pip install -e '.[{name}]'"
            ) from error
    if not classes:
        return None

    def opened(folder: Path, manifest: Manifest, note: Note) -> LoggerThread:
        return LoggerThread({name: client(folder) for name, client in classes.items()}, manifest, note)

    return opened


class LoggerThread:
    """Receives events from any thread. An exception of a logger becomes one note and never reaches the run."""

    def __init__(
        self, clients: Mapping[str, Client], manifest: Manifest, note: Note, *, most: int = MOST_WAITING
    ) -> None:
        self._clients = {name: guarded(client, f"--log {name}", note) for name, client in clients.items()}
        self._manifest, self._note, self._most = manifest, note, most
        self._waiting: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="potluck-loggers", daemon=True)
        self._thread.start()

    def event(self, event: RunEvent) -> None:
        if not isinstance(event, RunStarted | StepEnded | Logged):
            return
        if self._waiting.qsize() < self._most:
            self._waiting.put(event)
        else:
            self._lost += 1

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Write the queued values, within `patience_s`."""
        self._waiting.put(None)
        self._thread.join(patience_s)
        names = ", ".join(self._clients)
        if self._thread.is_alive():
            self._note(f"{names}: not finished after {patience_s:.0f} s; the last values may be missing there")
        elif self._lost:
            self._note(f"{self._lost} values are missing in {names}: it was too slow for the run")

    def _write(self) -> None:
        early: list[RunEvent] | None = []
        """Values that the script logged before its training; None once that has begun."""
        while (event := self._waiting.get()) is not None:
            if isinstance(event, RunStarted):
                self._begin(event)
                for each in early or ():
                    self._scalars(each)
                early = None
            elif early is not None:
                early.append(event)
            else:
                self._scalars(event)
        if early is None:
            for client in self._clients.values():
                client.close()

    def _begin(self, event: RunStarted) -> None:
        params = params_of(self._manifest, event)
        for name, client in self._clients.items():
            if where := client.begin(params, event.resumed_from or 0):
                self._note(f"{name}: {where}")

    def _scalars(self, event: RunEvent) -> None:
        assert isinstance(event, StepEnded | Logged)
        if values := scalars_of(event):
            for client in self._clients.values():
                client.scalars(event.step, values)
