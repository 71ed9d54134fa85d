"""A run on the machines of a cluster engine, started from Python: the host here, a guest on each machine.

During the run, added machines become guests and removed machines are dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, BinaryIO, Protocol, Self, Unpack

import msgspec

from potluck.errors import INTERRUPTED, MachineError, PotluckError, ScriptError
from potluck.fleet.agent import CommandOptions
from potluck.fleet.bootstrap import FleetNeeds
from potluck.fleet.interface import GuestFleet, GuestSettings
from potluck.fleet.launching import HostWork, Launcher, LaunchObserver, ReadyMachine
from potluck.fleet.local import HERE, end_words
from potluck.fleet.remote import RemoteTask
from potluck.fleet.ssh import SshFleet
from potluck.spec.events import CheckpointSaved, RunEnded, RunEvent, from_json
from potluck.spec.finding import Finding
from potluck.spec.fleet_file import NamedMachine

LOOK_S = 1.0
"""How often the engine is asked for its machines."""
MOST_READ = 1 << 20
STOP_S = 90.0
_AGAIN = "start(…, options=['--resume', '{run}'])"


class EngineFleet(GuestFleet, Protocol):
    """The machines of a cluster engine, which restarts them."""

    def instances(self) -> Mapping[str, str]:
        """All machines by name; the value changes when a machine is restarted."""


class ClusterFleet:
    """The machines of an engine, and those reached by ssh (including this one), for a launcher."""

    def __init__(self, engine: GuestFleet, reached: SshFleet, gpus: Callable[[str], int] = lambda name: 0) -> None:
        """`gpus`: number of GPUs of an engine's machine, each of which gets its own guest."""
        self._engine, self._reached, self._gpus = engine, reached, gpus

    def machine(self, name: str) -> NamedMachine:
        if name in self._reached.machines():
            return self._reached.machine(name)
        return NamedMachine(name=name, slots=max(1, self._gpus(name)))

    def log(self, name: str) -> Path:
        return self._reached.log(name)

    def reach(self, name: str) -> ReadyMachine:
        if name in self._reached.machines():
            return self._reached.reach(name)
        return SimpleNamespace(facts=SimpleNamespace(gpus=self._gpus(name)), findings=(), link=None)

    def in_place(self, name: str) -> bool:
        return name not in self._reached.machines() or self._reached.in_place(name)

    def prepare(self, name: str) -> ReadyMachine:
        return self._reached.prepare(name) if name in self._reached.machines() else self.reach(name)

    def run(self, machine: str, words: Sequence[str], log: Path, **more: Unpack[CommandOptions]) -> RemoteTask:
        return self._reached.run(machine, words, log, **more)

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> Any:
        fleet: GuestFleet = self._reached if machine in self._reached.machines() else self._engine
        return fleet.start(machine, token, settings, log)

    def close(self) -> None:
        closing = threading.Thread(target=self._engine.close, name="potluck-close-engine")
        closing.start()
        self._reached.close()
        closing.join()


@contextlib.contextmanager
def followed(engine: EngineFleet, launcher: Launcher, on_new: Callable[[str], None]) -> Iterator[None]:
    """Inside, the engine's machines are added to the launcher as they come, and dropped as they go."""
    over = threading.Event()

    def follow() -> None:
        known: dict[str, str] = {}
        while not over.is_set():
            try:
                there = dict(engine.instances())
            except PotluckError:
                there = known  # the engine does not answer just now
            for name in sorted(name for name, instance in there.items() if known.get(name) != instance):
                if name not in known:
                    on_new(name)
                launcher.add(name)
            for name in known.keys() - there.keys():
                launcher.drop(name)
            known = there
            over.wait(LOOK_S)

    thread = threading.Thread(target=follow, name="potluck-follow-engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run."""

    folder: str = ""
    """Its run folder, on the machine of its host; empty before that is known."""
    status: int | None = None
    """The host's exit status; None while it runs."""
    why: str = ""
    """A description of the failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """How a run ended. Paths are on the host's machine."""

    summary: RunEnded | None
    """None if the run was stopped before its first step."""
    checkpoint: Path | None
    folder: Path


class ClusterRun:
    """Runs a launcher in a thread. `state` and `read` report its progress; `stop` ends everything."""

    def __init__(
        self,
        engine: EngineFleet,
        script: str,
        arguments: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        runs: Path = Path("runs"),
        gpus: Callable[[str], int] = lambda name: 0,
    ) -> None:
        """`options`: as for `potluck host`."""
        runs = runs.expanduser().absolute()
        logs = runs / f".fleet-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        logs.mkdir(parents=True, exist_ok=True)
        reached = SshFleet([NamedMachine(name=HERE)], FleetNeeds(imports={}), logs=logs)
        words = ["-m", "potluck", "host", "--view", "plain", "--launched", _AGAIN]
        words += ["--runs", str(runs)]
        tail = [script, "--", *arguments] if arguments and script.endswith(".py") else [script, *arguments]
        work = HostWork(machine=HERE, words=[*words, *options, *tail], cwd=os.getcwd(), runs=str(runs))
        self._engine, self._log = engine, reached.log(HERE)
        self._observer = _Keeper(logs / "fleet.log")
        self._launcher = Launcher(ClusterFleet(engine, reached, gpus), (), work, self._observer, keep_trying=True)
        self._status: int | None = None
        self._why = ""
        # As a daemon, and all threads that it starts: a driver that ends does not wait for it, but stops it.
        self._thread = threading.Thread(target=self._run, name="potluck-cluster-run", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        status = 1
        try:
            with followed(self._engine, self._launcher, lambda name: None):
                status = self._launcher.run()
            if status:
                self._why = end_words(status, self._log)
        except PotluckError as error:
            self._why = str(error)
        except Exception as error:  # a bug: no caller may wait forever
            self._why = f"internal error: {type(error).__name__}: {error}"
        finally:
            if self._observer.run:
                with contextlib.suppress(OSError):
                    self._log.parent.rename(Path(self._observer.run) / "logs")
            self._status = status

    def state(self) -> ClusterState:
        """Its progress. Call it before the last `read`, so that nothing is missed."""
        return ClusterState(folder=self._observer.run, status=self._status, why=self._why)

    def read(self, offset: int) -> bytes:
        """The content of events.jsonl from `offset`; at most MOST_READ bytes."""
        return _read(Path(self._observer.run) / "events.jsonl", offset) if self._observer.run else b""

    def output(self, offset: int) -> bytes:
        """The host's output from `offset`; at most MOST_READ bytes."""
        moved = Path(self._observer.run) / "logs" / self._log.name
        return _read(self._log, offset) or (_read(moved, offset) if self._status is not None else b"")

    def stop(self) -> None:
        """Save and end the host, and all guests with it. A second call does nothing."""
        atexit.unregister(self.stop)
        if self._status is None:
            self._launcher.interrupt()
            self._thread.join(STOP_S)
            self._launcher.interrupt()
            self._thread.join(STOP_S)


class _Keeper(LaunchObserver):
    """Stores a launcher's messages: the run folder, and in a log, why a machine has no guest."""

    run = ""

    def __init__(self, log: Path) -> None:
        self._log = log

    def problems(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.tell(finding.machine, f"{finding.what}: {finding.how}")

    def tell(self, machine: str, words: str) -> None:
        with contextlib.suppress(OSError), open(self._log, "a", encoding="utf-8") as log:
            log.write(" ".join(filter(None, (time.strftime("%H:%M:%S"), machine, words))) + "\n")

    def run_known(self, run: str) -> None:
        self.run = run


class FleetRun:
    """A run that was started on a fleet. An exception while it is used, such as Ctrl-C, stops it.

    with fleet.start("my_train.py", ["--steps", "1000"]) as run:
        for event in run.events(): ...
    print(run.result().checkpoint)
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        """`ask` calls a method of the `ClusterRun` by name, possibly in another process."""
        self._ask = ask
        self._interrupted = False

    def events(self) -> Iterator[RunEvent]:
        """The run's events as they come, beginning with past ones, until the run has ended."""
        offset, half = 0, b""
        try:
            while True:
                state = self._ask("state")
                data = self._ask("read", offset)
                offset += len(data)
                *lines, half = (half + data).split(b"\n")
                yield from filter(None, map(_event, lines))
                if not data:
                    if state.status is not None:
                        return
                    time.sleep(0.2)
        except GeneratorExit:
            raise  # the loop over the events was left, the run goes on
        except BaseException:
            self.stop()
            raise

    def result(self) -> FleetResult:
        """Wait for the end of the run.

        Raises:
            ScriptError: the script failed.
            MachineError: the host failed or was lost.
        """
        summary, saved = None, ""
        for event in self.events():
            if isinstance(event, RunEnded):
                summary = event
            elif isinstance(event, CheckpointSaved):
                saved = event.path
        state = self._ask("state")
        if state.status:
            kind = ScriptError if state.status == 1 else MachineError
            raise kind(f"the run failed: {state.why}", hint=f"see the logs in {state.folder or 'runs'}")
        folder = Path(state.folder)
        return FleetResult(summary=summary, checkpoint=folder / saved if saved else None, folder=folder)

    def stop(self) -> None:
        """Save and end the host, and all guests with it."""
        self._ask("stop")

    def interrupt(self) -> None:
        """Stop, from a signal handler or any thread. The second call ends this process, and its engine the rest."""
        if self._interrupted:
            os._exit(INTERRUPTED)
        self._interrupted = True
        threading.Thread(target=self.stop, name="potluck-stop", daemon=True).start()

    def follow(self, stream: BinaryIO) -> ClusterState:
        """Copy the host's output to a stream until the run has ended. Returns how it ended."""
        offset = 0
        while True:
            state: ClusterState = self._ask("state")
            data = self._ask("output", offset)
            offset += len(data)
            stream.write(data)
            stream.flush()
            if not data:
                if state.status is not None:
                    return state
                time.sleep(0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop()


def _read(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(MOST_READ)
    except FileNotFoundError:
        return b""


def _event(line: bytes) -> RunEvent | None:
    try:
        return from_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # half a line, of a host that was killed
