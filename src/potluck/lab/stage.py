"""The processes of one strategy on a box: started, followed step by step, and always ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from potluck import checked
from potluck.errors import PotluckError
from potluck.lab.box import Box
from potluck.spec.outcome import Interval, TracedInterval

POLL_S = 0.05
LOG_LINES = 4
TRACE = "POTLUCK_TRACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a strategy."""

    strategy: str
    step: int
    steps: int
    step_s: float | None = None


Report = Callable[[Progress], None]


@dataclass(slots=True)
class Actor:
    """One process on one machine."""

    machine: str
    process: subprocess.Popen[bytes]
    log: Path
    expendable: bool = False
    """If true, its end is not a failure of the strategy, whatever its status."""


@dataclass
class Stage:
    """Inside the `with` block, processes run on the machines; after it, none of them runs any more."""

    box: Box
    folder: Path
    actors: list[Actor] = field(default_factory=list)
    traces: list[tuple[str, Path]] = field(default_factory=list)

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self.actors:
            self.end(actor)

    def start(self, machine: str, command: Sequence[str]) -> Actor:
        """Start a command of Python (`-m potluck …`) on a machine, its computing traced."""
        number = sum(a.machine == machine for a in self.actors)
        tag = machine if not number else f"{machine}-{number + 1}"
        log, trace = self.folder / f"{tag}.log", self.folder / f"{tag}.trace"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_")}
        environment |= {TRACE: str(trace), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # gloo complains that emulated machines have no host name
        process = self.box.start(machine, [sys.executable, *command], env=environment, log=log)
        actor = Actor(machine, process, log)
        self.actors.append(actor)
        self.traces.append((machine, trace))
        return actor

    def end(self, actor: Actor, *, at_once: bool = False) -> None:
        """End a process and wait for it."""
        actor.expendable = True
        if actor.process.poll() is None:
            if not at_once:
                actor.process.terminate()
                try:
                    actor.process.wait(3.0)
                except subprocess.TimeoutExpired:
                    at_once = True
            if at_once:
                actor.process.kill()
        actor.process.wait()

    def check(self) -> None:
        """Raise for the first process that has failed."""
        for actor in self.actors:
            status = actor.process.poll()
            if status and not actor.expendable:
                raise PotluckError(
                    f"on {actor.machine}, the process ended with status {status}: {log_tail(actor.log)}",
                    hint=f"its complete output is in {actor.log}",
                    machine=actor.machine,
                )

    def follow(
        self,
        path: Path,
        until: Callable[[], bool],
        timeout_s: float,
        between: Callable[[], None] = lambda: None,
    ) -> Iterator[bytes]:
        """The lines of a growing file, until it is complete; raises an error if nothing comes for too long.

        `between` is called whenever there is nothing new.
        """
        position, deadline = 0, time.monotonic() + timeout_s
        while True:
            complete = until()
            for line, end in _new_lines(path, position):
                position, deadline = end, time.monotonic() + timeout_s
                yield line
            if complete:
                return
            between()
            self.check()
            if time.monotonic() > deadline:
                logs = ", ".join(str(a.log) for a in self.actors)
                raise PotluckError(
                    f"no step was made for {timeout_s:.0f} s: {self._states()}", hint=f"their logs: {logs}"
                )
            time.sleep(POLL_S)

    def wait_for_file(self, pattern: str, timeout_s: float) -> Path:
        """Wait until a process has written a file."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := sorted(self.folder.glob(pattern)):
                return found[0]
            self.check()
            time.sleep(POLL_S)
        raise PotluckError(f"no {pattern} after {timeout_s:.0f} s: {self._states()}", hint=f"see {self.folder}")

    def computing(self) -> list[Interval]:
        """When each machine computed, from the traces."""
        found = []
        for machine, path in self.traces:
            for line, _ in _new_lines(path, 0):
                traced = checked.decode(line, TracedInterval)
                found.append(Interval(machine=machine, kind="compute", start=traced.start, end=traced.end))
        return found

    def _states(self) -> str:
        states = []
        for actor in self.actors:
            status = actor.process.poll()
            states.append(f"{actor.machine} " + ("runs" if status is None else f"ended with status {status}"))
        return "; ".join(states)


def _new_lines(path: Path, position: int) -> Iterator[tuple[bytes, int]]:
    """The complete lines from a position on, each with the position after it."""
    try:
        with open(path, "rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                yield line, position
    except FileNotFoundError:
        return


def log_tail(log: Path, most: int = LOG_LINES) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-most:]) or "it said nothing"
