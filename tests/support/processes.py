"""Real processes for tests: started in sessions of their own, waited for with a deadline, never left behind.

    with Processes(tmp_path) as processes:
        host = processes.potluck("host", "--steps", "20", name="host")
        host.wait_for_text("potluck join", deadline_s=20)
        ...
        host.succeeds(deadline_s=60)

It knows how processes are run, nothing of what they do. Pass `env` to set variables for one process only.
Hosts, guests and scripts are forked from a process that has torch and potluck (support.forks), unless asked for
`fork=False`; with `-c` Python starts anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, TypeVar, Unpack

import psutil

from support import forks

SOURCE = Path(__file__).resolve().parents[2] / "src"
TAIL_LINES = 40
POLL_S = 0.02
LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()

T = TypeVar("T")


class Options(TypedDict, total=False):
    """What can be said of every process; see `Processes.start`."""

    env: Mapping[str, str | None] | None
    cwd: Path | None
    children: int
    merged: bool


class ProcessFailure(AssertionError):
    """A process ended otherwise than expected, or did not end; the message holds the tails of its logs."""


class TestProcess:
    """One running process with its logs. `out` and `err` are its files."""

    __test__ = False

    def __init__(self, name: str, popen: subprocess.Popen[bytes] | forks.Forked, out: Path, err: Path) -> None:
        self.name = name
        self.out = out
        self.err = err
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit status (negative: the signal that ended it), or None while it runs."""
        return self._popen.poll()

    def stdout(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        return self.err.read_text(encoding="utf-8", errors="replace")

    def wait(self, deadline_s: float) -> int:
        """Its exit status; ProcessFailure, after a kill, when it has not ended in time."""
        try:
            return self._popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessFailure(f"{self.name} had not ended after {deadline_s:.0f} s\n{self.tails()}") from None

    def succeeds(self, deadline_s: float) -> str:
        """Wait, expect exit status 0, and return what it wrote to stdout."""
        self.exits_with(0, deadline_s)
        return self.stdout()

    def exits_with(self, status: int, deadline_s: float) -> None:
        found = self.wait(deadline_s)
        if found != status:
            raise ProcessFailure(f"{self.name} ended with {found}, expected {status}\n{self.tails()}")

    def wait_for_text(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """Until a regular expression is found in stdout or stderr; ProcessFailure when it ends before."""
        return self.wait_until(
            lambda: re.search(pattern, self.stdout()) or re.search(pattern, self.stderr()),
            deadline_s,
            f"{pattern!r} in its output",
        )

    def wait_until(self, found: Callable[[], T | None], deadline_s: float, what: str) -> T:
        """Until `found` returns something true."""
        deadline = time.monotonic() + deadline_s
        while True:
            ended = self.returncode is not None
            # Asked after the look at the status: what it wrote last is then already there.
            result = found()
            if result:
                return result
            if ended:
                raise ProcessFailure(f"{self.name} ended with {self.returncode} before {what}\n{self.tails()}")
            if time.monotonic() > deadline:
                raise ProcessFailure(f"{self.name}: no {what} after {deadline_s:.0f} s\n{self.tails()}")
            time.sleep(POLL_S)

    def signal(self, number: int) -> None:
        """To this process alone, as a person at the keyboard or the kernel would."""
        if self.returncode is None:
            self._popen.send_signal(number)

    def interrupt(self) -> None:
        """Ctrl-C goes to the whole foreground group."""
        self._signal_group(signal.SIGINT)

    def stop(self) -> None:
        """The machine falls asleep: no FIN, no word."""
        self._signal_group(getattr(signal, "SIGSTOP", 0))

    def resume(self) -> None:
        self._signal_group(getattr(signal, "SIGCONT", 0))

    def kill(self) -> None:
        """-9 to the process and all its descendants in the session; waits until it is gone."""
        if os.name == "posix":
            self._signal_group(signal.SIGKILL)
        else:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._popen.pid).children(recursive=True):
                    child.kill()
            self._popen.kill()
        self._popen.wait(10)

    def tails(self) -> str:
        """The last lines of both logs, for messages."""
        parts = []
        for label, text in (("stdout", self.stdout()), ("stderr", self.stderr())):
            lines = text.splitlines()[-TAIL_LINES:]
            parts.append(f"--- {self.name} {label} ({len(lines)} last lines)\n" + "\n".join(lines))
        return "\n".join(parts)

    def _signal_group(self, number: int) -> None:
        if os.name != "posix":
            import pytest  # the campaign does without

            pytest.skip("needs signals to groups of processes, as POSIX has them")
        # The group outlives its leader while a descendant lives; its id is the leader's pid.
        # PermissionError is what macOS says of a group that holds only zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


class Processes:
    """Starts processes and, at its end, kills whatever still runs. On a failure it prints the logs' tails."""

    def __init__(self, folder: Path, *, fork: bool = True) -> None:
        self._folder = folder
        self._fork = fork
        self._all: list[TestProcess] = []

    def potluck(self, *args: str, name: str = "", **options: Unpack[Options]) -> TestProcess:
        """`python -m potluck ARGS` from this source tree."""
        return self.start([sys.executable, "-m", "potluck", *args], name=name or args[0], **options)

    def python(self, *args: str, name: str = "python", **options: Unpack[Options]) -> TestProcess:
        return self.start([sys.executable, *args], name=name, **options)

    def torchrun(self, *args: str, ranks: int = 2, **options: Unpack[Options]) -> TestProcess:
        """`torchrun ARGS` with so many ranks on this machine."""
        logs = ["--log-dir", str(self._folder / "torchrun")]  # or it leaves a folder among the temporary ones
        words = ["-m", "torch.distributed.run", *logs, "--nproc-per-node", str(ranks), *args]
        return self.start([sys.executable, *words], name="torchrun", **{"children": ranks, **options})

    def start(
        self,
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        children: int = 0,
        merged: bool = False,
    ) -> TestProcess:
        """Start a command.

        Args:
            env: variables that differ from the tests' own; None for one that it must not have.
            children: how many processes with torch it starts: where it is forked, these are forks as well.
            merged: what it writes to stderr goes to the same file as what it writes to stdout.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{len(self._all):02d}-{name}"
        out, err = self._folder / f"{stem}.out", self._folder / f"{stem}.{'out' if merged else 'err'}"
        settings = _environment(env or {})
        popen: subprocess.Popen[bytes] | forks.Forked
        with out.open("ab") as stdout, err.open("ab") as stderr:
            if self._fork and forks.can_be_forked(command, settings, children=children):
                where = cwd or self._folder
                popen = forks.fork(command, cwd=where, env=settings, out=out, err=err, children=children)
            else:
                popen = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=cwd or self._folder,
                    env=settings,
                    start_new_session=True,
                )
        process = TestProcess(name, popen, out, err)
        self._all.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tails = [process.tails() for process in self._all] if error is not None else []
        for process in self._all:
            process.kill()
        if tails:
            print("\n".join(tails))


def ids_below(pid: int) -> list[int]:
    """The processes below one. Linux keeps lists of children; psutil reads all processes of the machine, which adds
    up where it is asked thousands of times."""
    if not LISTS_CHILDREN:
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_bytes().split()]
        except OSError:
            continue  # the thread or the process has ended meanwhile
        for child in children:
            found += [child, *ids_below(child)]
    return found


def _environment(extra: Mapping[str, str | None], own: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' own, without settings of the developer, with this source tree, one thread, and UTF-8."""
    env = {name: value for name, value in (own or os.environ).items() if not name.startswith("POTLUCK_")}
    path = os.pathsep.join(filter(None, (str(SOURCE), env.get("PYTHONPATH", ""))))
    env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    env |= {name: value for name, value in extra.items() if value is not None}
    return {name: value for name, value in env.items() if extra.get(name, "") is not None}
