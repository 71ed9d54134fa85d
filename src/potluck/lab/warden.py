"""Ends all processes of a box when its owner is gone, even by kill -9. One process for each box.

    python -m potluck.lab.warden FOLDER

Each line of its stdin is the id of a process that was just started. When stdin ends, because the owner closed it or
died, the processes that still run are killed, with the groups that they lead, and the box's private FOLDER is
removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable

import psutil


def watch(lines: Iterable[str], folder: str) -> None:
    """Collect process ids until the lines end, then end these processes."""
    known: list[psutil.Process] = []
    for line in lines:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was quick
            known.append(psutil.Process(int(line)))
    for process in known:
        end(process)
    shutil.rmtree(folder, ignore_errors=True)


def end(process: psutil.Process) -> None:
    """Kill a process and the group it leads, unless its id now belongs to another."""
    if not process.is_running() and psutil.pid_exists(process.pid):
        return
    if os.name == "posix":
        # The group may outlive its leader, and keeps the id from being given to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


if __name__ == "__main__":
    watch(sys.stdin, sys.argv[1])
