"""Hosts and guests as processes of their own, forked from one that has imported everything: up in 50 ms, not 3 s.

Owns their lives: they end with the campaign whatever happens to it. It must not know what they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

DEADLINE_S = 120.0
"""Nothing here takes a tenth of it, but the machine may be busy with other things."""
POLL_S = 0.002
_PR_SET_PDEATHSIG = 1


class Trouble(Exception):
    """Something that must not be, in words."""


class Process:
    """One forked process; its output is in `log`."""

    def __init__(self, pid: int, name: str, log: Path) -> None:
        self.pid, self.name, self.log = pid, name, log
        self.status: int | None = None
        """The exit status; negative: the signal that ended it."""

    def running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        self.until(lambda: not self.running(), "its end", deadline_s)
        assert self.status is not None
        return self.status

    def succeeds(self, deadline_s: float = DEADLINE_S) -> None:
        if status := self.wait(deadline_s):
            raise Trouble(f"{self.name} ended with {status}\n{self.tail()}")

    def until(self, found: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for something that this process does; its end ends the wait."""
        waited_s, last = 0.0, time.monotonic()
        while True:
            ended = not self.running()
            if found():
                return
            if ended:
                raise Trouble(f"{self.name} ended with {self.status} before {what}\n{self.tail()}")
            # A campaign that is stopped for a while (Ctrl-Z) is not late: a long pause counts for a second.
            waited_s, last = waited_s + min(1.0, time.monotonic() - last), time.monotonic()
            if waited_s > deadline_s:
                raise Trouble(f"{self.name}: no {what} after {deadline_s:.0f} s\n{self.tail()}")
            time.sleep(POLL_S)

    def signal(self, number: int) -> None:
        if self.running():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """-9 to the process and what it started; waits until it is gone."""
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(f"    {self.name}: {line}" for line in text.splitlines()[-lines:])


def fork(work: Callable[[], int], *, name: str, log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Run `work` in a process of its own, which exits with what it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        # Both do this: whoever comes first, the group is there when kill() needs it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return Process(pid, name, log)
    status = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the campaign's own handler is not theirs
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        with contextlib.suppress(OSError, AttributeError):  # only Linux has it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env or {})
        tempfile.tempdir = None
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def potluck(words: Sequence[object], *, name: str, log: Path, env: Mapping[str, str] | None = None) -> Process:
    """`potluck WORDS` in a process of its own."""
    from potluck.cli._app import run

    return fork(lambda: run([str(word) for word in words]), name=name, log=log, env=env)


def import_everything() -> None:
    """What a host or a guest needs, before the first fork; nothing here may start a thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in [name for name in os.environ if name.startswith("POTLUCK_")]:
        del os.environ[name]
    import torch
    import torch._dynamo  # torch's optimizers import it when they are made

    import potluck.cli.host
    import potluck.cli.join
    import potluck.cli.train
    import potluck.fleet.script
    import potluck.report.guest_view
    import potluck.train.recipes.gpt
    import potluck.train.run  # noqa: F401

    torch.set_num_threads(1)
