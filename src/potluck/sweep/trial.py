"""One trial on the machine that hosts it: `potluck host SCRIPT` as a process, what it reports, its checkpoints.

The process belongs to an agent (fleet/agent.py), which ends it, and all that it has started, with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from potluck import checked
from potluck.errors import MachineError
from potluck.fleet import agent
from potluck.fleet.bootstrap import FleetNeeds, variables_here
from potluck.fleet.remote import AgentLink, words_of
from potluck.fleet.sealed import seal
from potluck.spec.events import CheckpointSaved, Logged, RunStarted, StepEnded, from_json
from potluck.spec.fleet_file import NamedMachine
from potluck.sweep.spec import CheckpointOrigin, SweepWork, Trial, TrialNews

PATIENCE_S = 2.0
GREET_S = 60.0
SPARE_S = 15.0
"""A trial with less left than this has the process of the next one started."""
SPARE_LIVES_S = 5.0
"""How long it outlives that trial if no other trial begins."""
_AGAIN = "potluck host {script} --resume {run}"
_HANDED = ("manifest.json", "events.jsonl")
"""Files that are copied with the checkpoint, without the keys: a trial that moves gets new ones."""


_ORIGIN = "trial.json"


def handed_over(storage: Path, origin: CheckpointOrigin | None = None) -> Path | None:
    """The newest checkpoint of a trial in the storage, with what is needed to resume from it.

    With `origin`, checkpoints of another sweep or of other arguments are ignored, and the trial starts again.
    """
    found = [path for path in storage.glob("step-*") if (path / "manifest.json").exists()]
    if origin is not None:
        found = [path for path in found if _origin_of(path) == origin]
    return max(found, key=lambda path: path.name, default=None)


def _origin_of(checkpoint: Path) -> CheckpointOrigin | None:
    try:
        return checked.decode((checkpoint / _ORIGIN).read_bytes(), CheckpointOrigin)
    except (OSError, msgspec.MsgspecError):
        return None


def hand_over(run: Path, step: int, storage: Path, origin: CheckpointOrigin) -> Path | None:
    """Copy a run's checkpoint to the storage, completely or not at all. Returns None if it was removed in the
    meantime."""
    name = f"step-{step:08d}"
    to, part = storage / name, storage / f".{name}-{os.getpid()}"
    storage.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(run / "checkpoints" / name, part / "checkpoints" / name)
        for file in _HANDED:
            shutil.copy(run / file, part / file)
        (part / _ORIGIN).write_bytes(msgspec.json.encode(origin))
        shutil.rmtree(to, ignore_errors=True)
        part.rename(to)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        return None
    for old in storage.glob("step-*"):
        if old.name < name:
            shutil.rmtree(old, ignore_errors=True)
    return to


def kept_files(storage: Path) -> Path:
    """The folder for files that a trial's script wrote."""
    return storage / "files"


def keep_files(folder: Path, sent: Collection[str], storage: Path) -> None:
    """Copy what a script wrote to its working folder to the storage; `sent`: the files that were there before."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and name not in sent and "__pycache__" not in path.parts:
            to = kept_files(storage) / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)


class SpareProcess:
    """A process that imports torch and then waits for its command's arguments."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-trial-"))
        self.script, self.runs = self.folder / "script", self.folder / "runs"
        needs = FleetNeeds(imports={}).of(NamedMachine(name=name))
        self.link = AgentLink(name, [sys.executable, *words_of(agent, needs)])
        if self.link.greet(GREET_S) is None:
            self.close()
            raise MachineError(f"{name}: no process can be started: {self.link.said}")
        self.task = self.link.run(
            [sys.executable, "-m", "potluck.sweep.warm", "host"],
            self.folder / "log",
            cwd=str(self.script),
            env=variables_here(),
            runs=str(self.runs),
            remove=str(self.folder),  # by the agent, where this process is killed
            patience_s=PATIENCE_S,
        )

    def close(self) -> None:
        """End what it runs; nothing of it stays on this machine."""
        with contextlib.suppress(OSError):
            self.link.close(PATIENCE_S + 2.0)
        shutil.rmtree(self.folder, ignore_errors=True)


class Spares:
    """At most one spare process, for the next trial of this process. It ends soon if none comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: SpareProcess | None = None
        self._thread: threading.Thread | None = None
        self._until = 0.0
        """The time at which it ends, by the monotonic clock."""

    def start(self, name: str) -> None:
        """Start one in a thread, unless there is one."""
        with self._lock:
            self._until = time.monotonic() + SPARE_S + SPARE_LIVES_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, args=(name,), name="potluck-spare", daemon=True)
                self._thread.start()

    def _keep(self, name: str) -> None:
        spare = None
        with contextlib.suppress(OSError, MachineError):  # the trial starts its own, and says why that fails
            spare = self._spare = SpareProcess(name)
        while spare is not None and self._spare is spare and time.monotonic() < self._until:
            time.sleep(0.1)
        with self._lock:
            left, self._thread = self._spare, None
            self._spare = None
        if left is not None:
            left.close()

    def take(self) -> SpareProcess | None:
        """The spare process, if it exists and is alive."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.task.wait(0.0) is not None:
            spare.close()
            return None
        return spare

    def soon_unwanted(self) -> None:
        """A trial has ended: if no other one begins now, the spare process ends."""
        with self._lock:
            self._until = min(self._until, time.monotonic() + SPARE_LIVES_S)


spares = Spares()
"""The spare process of this process, in which one trial runs after the other."""


class TrialProcess:
    """A trial that this machine hosts, from its start to its end."""

    def __init__(
        self,
        work: SweepWork,
        trial: Trial,
        *,
        name: str,
        start_from: Path | None = None,
        bind: str | None = None,
        threads: int | None = None,
    ) -> None:
        """`name`: this machine's name. `start_from`: a result of `hand_over` to resume from."""
        self._work, self._name, self._origin = work, name, work.origin(trial)
        self._process = spares.take() or SpareProcess(name)
        self._task, script, runs = self._process.task, self._process.script, self._process.runs
        for file, content in zip(work.names, work.contents):
            path = script / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        words = ["host", f"./{work.names[0]}", "--view", "plain", "--launched", _AGAIN]
        words += ["--name", name, "--runs", str(runs), "--checkpoint-every", str(work.checkpoint_every)]
        words += [word for file in work.names[1:] for word in ("--send", file)]
        words += ["--bind", bind] if bind else []
        words += ["--threads", str(threads)] if threads else []
        if start_from is not None:
            shutil.copytree(start_from, runs / trial.id)
            words += ["--resume", str(runs / trial.id)]
        # A launched host waits for its launcher's word: a second line.
        self._task.feed(json.dumps([*words, "--", *work.words(trial)]) + "\n\n")
        self._news, self._offset, self._saved = TrialNews(), 0, 0

    @property
    def run(self) -> Path | None:
        """The run folder, once it is there."""
        if self._task.run:
            return Path(self._task.run)
        return next((path.parent for path in self._process.runs.glob("*/events.jsonl")), None)

    def news(self) -> TrialNews:
        """The state of the trial now.

        Raises: MachineError: its process was lost, so its end is unknown. It can be started again.
        """
        ended = self._task.wait(0.0)
        if ended is not None and ended.status is None:
            raise MachineError(f"the trial was lost: {ended.why}", hint="it resumes from its checkpoint")
        if self._task.token and not self._news.token:
            self._tell(token=seal(self._task.token, self._work.public))
        self._read_events()
        if ended is not None:
            why = ended.why or f"ended with status {ended.status}" if ended.status else ""
            self._tell(status=ended.status, why=why, remaining_s=0.0)
        return self._news

    def checkpoint_to(self, storage: Path) -> Path | None:
        """Copy the last checkpoint to the storage if it is a new one. Returns its folder."""
        step = self._saved
        if self.run is None or not step or step == self._news.checkpoint:
            return None
        handed = hand_over(self.run, step, storage, self._origin)
        if handed is not None:
            self._tell(checkpoint=step)
        return handed

    def keep_files(self, storage: Path) -> None:
        """Copy the files that the script wrote to its working folder to the storage, if any."""
        keep_files(self._process.script, self._work.names, storage)

    def close(self) -> None:
        """End it, if it runs; nothing of it stays on this machine."""
        self._process.close()
        spares.soon_unwanted()

    def prepare_next(self) -> None:
        """Start the next trial's process if this trial is nearly done."""
        if self._news.remaining_s is not None and self._news.remaining_s < SPARE_S:
            spares.start(self._name)

    # -- what it reports --------------------------------------------------------------------------------

    def _tell(self, **changes: object) -> None:
        self._news = msgspec.structs.replace(self._news, **changes)

    def _read_events(self) -> None:
        if self.run is None:
            return
        try:
            with open(self.run / "events.jsonl", "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        match from_json(line):
            case RunStarted(steps=steps, resumed_from=resumed):
                self._tell(steps=steps, resumed_from=resumed)
            case StepEnded() as event:
                metrics = {**self._news.metrics, "loss": event.loss}
                helped = {name for name, samples in event.samples.items() if samples and name != self._name}
                guests = tuple(sorted(helped | set(self._news.guests)))
                self._tell(step=event.step, metrics=metrics, remaining_s=event.eta_s, guests=guests)
            case Logged(values=values):
                self._tell(metrics={**self._news.metrics, **values})
            case CheckpointSaved(step=step):
                self._saved = step
            case _:
                pass
