"""pytest's workers, forked from one process that has imported all test modules, and the order in which they work.

By itself `pytest -n 8` starts eight processes, and each imports torch and 250 test modules: 8 s of CPU. Here one
process does so, and the workers are its forks. This module owns the command that xdist starts a worker with, and it
runs the tests that judge time when all others are done.

    python workers.py serve SOCKET OWNER ARGUMENTS-OF-PYTEST...
    python workers.py SOCKET SERVER -u -c CODE        as `python -u -c CODE`, in a fork

Without this (no Linux, CUDA, a process that has threads) workers start as xdist starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

NAME = "workers"
ALONE = "alone"
"""The list of tests that run alone, in the shared folder; and the name of their unit of work."""
FEWEST = 3
"""Two workers are up sooner by themselves, on a core each."""
PR_SET_PDEATHSIG = 1


def prepare(config: pytest.Config, folder: Path) -> None:
    """Start the process that is forked, and have xdist start workers as its forks."""
    import functools
    import shlex
    import subprocess

    path = folder / NAME
    can = hasattr(os, "pidfd_open") and not Path("/dev/nvidiactl").exists() and len(str(path).encode()) < 100
    if not can or len(config.option.tx) < FEWEST:
        return
    words = ["-n0", "--collect-only", "-qq", "-p", "no:faulthandler"]
    arguments = [*map(str, config.invocation_params.args), *words]
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", str(path), str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    worker = shlex.join([sys.executable, __file__, str(path), str(server.pid)])
    config.option.tx = [f"popen//python={worker}"] * len(config.option.tx)
    config.add_cleanup(functools.partial(server.__exit__, None, None, None))
    config.add_cleanup(server.terminate)


# -- a worker, as xdist has started it -----------------------------------------------------------------------


def ask(path: str, server: int, words: list[str]) -> None:
    """Have a fork do this with the files of this process, and wait for its end."""
    import select

    ended = select.poll()
    ended.register(os.pidfd_open(server), select.POLLIN)
    connection = socket.socket(socket.AF_UNIX)
    while connection.connect_ex(path) != 0:
        if ended.poll(20):  # it cannot be forked
            os.execv(sys.executable, [sys.executable, *words])
    request = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    connection.shutdown(socket.SHUT_WR)
    for file in (0, 1):
        os.close(file)  # or nobody would see the worker's end
    with contextlib.suppress(KeyboardInterrupt):
        connection.recv(1)


# -- the process that is forked ------------------------------------------------------------------------------


def serve(path: str, owner: int, arguments: list[str]) -> None:
    """Collect the tests, which imports all they need; fork a worker for each that asks, until the owner ends."""
    import ctypes
    import gc
    import select
    import signal

    import pytest

    alive = os.pidfd_open(owner)
    gc.disable()
    pytest.main(arguments)
    gc.collect()
    gc.freeze()
    gc.enable()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return  # threads do not survive a fork
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    poll = select.poll()
    for file in (alive, listener.fileno()):
        poll.register(file, select.POLLIN)
    while alive not in dict(poll.poll()):
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        os.close(alive)
        _become(connection)


def _become(connection: socket.socket) -> None:
    """Run what was asked for, as a process of its own would, and end."""
    import atexit

    said, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while part := connection.recv(1 << 20):
        said += part
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    request = json.loads(said)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdin = os.fdopen(0, "r", 1, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    code = request["words"][request["words"].index("-c") + 1]
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(status)  # torch's destructors would touch, and so copy, all that is shared


# -- which worker does what ----------------------------------------------------------------------------------


def scheduler(config: pytest.Config, log: Any, folder: Path) -> Any:
    """File by file, as `--dist loadfile`; those that judge time when all others are done, one after the other."""
    from xdist.scheduler import LoadFileScheduling

    class AloneLast(LoadFileScheduling):
        def schedule(self) -> None:
            if self.collection is None:
                listed = folder / ALONE
                self._alone = set(listed.read_text(encoding="utf-8").split("\n")) if listed.exists() else set()
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return ALONE if nodeid in self._alone else str(super()._split_scope(nodeid))

        def _waits(self) -> bool:
            """The tests that run alone are next, and more than one worker is there."""
            return next(iter(self.workqueue), "") == ALONE and len(self.assigned_work) > 1

        def _assign_work_unit(self, node: Any) -> None:
            if not self._waits():
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if not self._waits():
                super()._reschedule(node)
            elif any(not other.shutting_down for other in self.nodes if other is not node):
                node.shutdown()  # when it has done what it has

        def remove_node(self, node: Any) -> Any:
            crashed = super().remove_node(node)
            for last in self.nodes if len(self.nodes) == 1 else []:
                self._reschedule(last)
            return crashed

    return AloneLast(config, log)


def alone_last(items: list[pytest.Item]) -> None:
    """Put the tests that run alone at the end, and list them for the scheduler."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def list_alone(items: list[pytest.Item], folder: Path) -> None:
    names = [item.nodeid for item in items if item.get_closest_marker("alone") is not None]
    own = folder / f"{ALONE}-{os.getpid()}"
    own.write_text("\n".join(names), encoding="utf-8")
    own.rename(folder / ALONE)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        ask(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
