"""Prevents this machine from sleeping when idle while it takes part in a run, on macOS, Linux and Windows."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_LOCKS = ("idle", "sleep")
"""An ssh login may block `idle`, but `sleep` only if polkit allows it. One lock for both would be refused as a
whole."""
_CONTINUOUS, _SYSTEM_REQUIRED = 0x8000_0000, 0x1


@contextmanager
def awake() -> Iterator[None]:
    """Inside, the system does not sleep when idle. The lock ends with this process at the latest.

    It does not prevent sleep by a closed lid, an empty battery or the user. If there is no such lock, or it is
    refused, nothing happens.
    """
    with ExitStack() as stack:
        if sys.platform == "win32":
            _stay_awake_on_windows(stack)
        elif sys.platform == "darwin":
            _hold(stack, "caffeinate", "-ims", "-w", str(os.getpid()))
        else:
            for lock in _LOCKS:
                # `cat` ends with its stdin, so also when this process is killed.
                _hold(stack, "systemd-inhibit", f"--what={lock}", "--who=potluck", "--why=training", "cat")
        yield


def _hold(stack: ExitStack, *words: str) -> None:
    """Run this until the stack closes."""
    if not shutil.which(words[0]):
        return
    with contextlib.suppress(OSError):
        pipe = subprocess.PIPE
        nowhere = subprocess.DEVNULL
        # A session of its own: Ctrl-C is for the run, which then saves.
        process = subprocess.Popen(words, stdin=pipe, stdout=nowhere, stderr=nowhere, start_new_session=True)
        # One that is refused ends at once, and must not stay as a zombie.
        reaper = threading.Thread(target=process.wait, name="potluck-awake", daemon=True)
        reaper.start()
        stack.callback(_end, process, reaper)


def _end(process: subprocess.Popen[bytes], reaper: threading.Thread) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.kill()
    reaper.join()


def _stay_awake_on_windows(stack: ExitStack) -> None:
    """In a thread: the request belongs to the thread that makes it, and any thread may close the stack."""
    over = threading.Event()

    def ask() -> None:
        kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
        kernel.SetThreadExecutionState(_CONTINUOUS | _SYSTEM_REQUIRED)
        over.wait()
        kernel.SetThreadExecutionState(_CONTINUOUS)

    thread = threading.Thread(target=ask, name="potluck-awake", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)
