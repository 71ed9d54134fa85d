"""Children of a forked process that are forks as well: spares, made while it has one thread, wait for a command.

It owns `subprocess.Popen` in such a process. A spare is a real child of it: its id, its parent, its signals and its
status are those of a child that was started as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
MOST_BYTES = 1 << 20
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
NOT_COMMANDS = ("-u", "-I", "-S")
"""Options of Python that change nothing for a process that has started."""


class Entered(BaseException):
    """Stands for the exec by which a process becomes its command."""

    def __init__(self, words: list[str]) -> None:
        super().__init__(words)
        self.words = words


class Spare:
    def __init__(self, pid: int, pipe: socket.socket) -> None:
        self.pid = pid
        self.pipe = pipe

    def become(self, task: dict[str, Any], files: Sequence[int]) -> None:
        socket.send_fds(self.pipe, [json.dumps(task).encode()], list(files))
        self.pipe.close()


def prepare(
    count: int, called: Callable[[Sequence[str]], bool], settle: Callable[[str, Mapping[str, str]], None]
) -> list[str] | None:
    """Make the spares, and have Popen use them for commands that are `called` so; None.

    It returns once more in each spare that is given a command: what that one is to run, with its folder and its
    environment settled.
    """
    spares: list[Spare] = []
    for _ in range(count):
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.close()
            for other in spares:
                other.pipe.close()
            task = _wait(theirs)
            settle(task["cwd"], task["env"])
            return _entered(task["words"])
        theirs.close()
        spares.append(Spare(pid, ours))
    _use(spares, called)
    return None


def _use(spares: list[Spare], called: Callable[[Sequence[str]], bool]) -> None:
    started_as_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(started_as_usual)

    def start(self: Any, *arguments: Any) -> None:
        call = signature.bind(self, *arguments).arguments
        words = list(map(os.fspath, call["args"])) if not isinstance(call["args"], str) else [call["args"]]
        if not spares or words[0] != sys.executable or call["pass_fds"] or not called(_command(words)):
            started_as_usual(self, *arguments)
            return
        spare = spares.pop(0)
        if call["preexec_fn"] is not None:
            with _instead("getpid", lambda: spare.pid):  # what it does is to name its process
                call["preexec_fn"]()
        given = (call["p2cread"], call["c2pwrite"], call["errwrite"])
        task = {"words": words[1:], "session": call["start_new_session"]}
        task |= {"cwd": os.fspath(call["cwd"] or os.getcwd()), "env": dict(call["env"] or os.environ)}
        spare.become(task, [usual if file == -1 else file for usual, file in enumerate(given)])
        self.pid, self._child_created = spare.pid, True
        self._close_pipe_fds(*(call[name] for name in PIPES))

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _command(words: Sequence[str]) -> list[str]:
    """What Python is called with, behind `enter.py … --` as well."""
    rest = [word for word in words[1:] if word not in NOT_COMMANDS]
    if rest and rest[0].endswith("enter.py") and "--" in rest:
        inner = rest[rest.index("--") + 1 :]
        return _command(inner) if inner[:1] == [sys.executable] else []
    return rest


@contextlib.contextmanager
def _instead(name: str, function: Callable[..., Any]) -> Iterator[None]:
    usual = getattr(os, name)
    setattr(os, name, function)
    try:
        yield
    finally:
        setattr(os, name, usual)


# -- in the spare ----------------------------------------------------------------------------------------


def _wait(theirs: socket.socket) -> dict[str, Any]:
    """Until a command comes; the end when the owner is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    said, files, _, _ = socket.recv_fds(theirs, MOST_BYTES, 3)
    if not said:
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    signal.signal(signal.SIGINT, before)
    theirs.close()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    os.closerange(3, max(files) + 64)
    task: dict[str, Any] = json.loads(said)
    if task["session"]:
        os.setsid()
    return task


def _entered(words: list[str]) -> list[str]:
    """Run `enter.py` if that stands before the command."""
    while words[0] in NOT_COMMANDS:
        words = words[1:]
    if not words[0].endswith("enter.py"):
        return words
    from potluck.lab import enter

    def replaced(file: str, command: Sequence[str]) -> None:
        raise Entered(list(command))

    try:
        with _instead("execvp", replaced):
            status = enter.main(words[1:])
    except Entered as entered:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        with contextlib.suppress(AttributeError):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _entered(entered.words[1:])
    os._exit(status)
