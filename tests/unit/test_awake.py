"""What keeps a machine awake while it takes part: for as long as the process lives, on each system."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from potluck.train.awake import awake

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")

PROGRAM = """#!/bin/sh
echo $$ "$@" >> {folder}/asked
{then}
"""


def stand_in(folder: Path, name: str, then: str) -> None:
    """A program of this name that writes its number and what it was asked for."""
    (folder / name).write_text(PROGRAM.format(folder=folder, then=then))
    (folder / name).chmod(0o755)


def asked(folder: Path, count: int) -> list[tuple[int, str]]:
    file = folder / "asked"
    until(lambda: file.exists() and file.read_text().count("\n") >= count)
    return [(int(line.split()[0]), line.partition(" ")[2]) for line in file.read_text().splitlines()]


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_linux_is_asked_for_two_locks_so_that_one_is_granted_where_the_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = 'case $1 in --what=sleep) echo "Access denied" >&2; exit 1 ;; esac'
    stand_in(tmp_path, "systemd-inhibit", f"{refuses}\nexec cat")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with awake():
        found = asked(tmp_path, 2)
        assert sorted(words.split()[0] for _, words in found) == ["--what=idle", "--what=sleep"]
        (idle,) = [pid for pid, words in found if "--what=idle" in words]
        assert runs(idle)
        assert os.getsid(idle) == idle  # a Ctrl-C for the run does not end it
    assert not runs(idle)


def test_a_killed_process_keeps_no_machine_awake(tmp_path: Path) -> None:
    stand_in(tmp_path, "systemd-inhibit", "exec cat")
    program = "import time; from potluck.train.awake import awake\nwith awake(): time.sleep(600)"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen([sys.executable, "-c", program], env=env)
    try:
        found = asked(tmp_path, 2)
        assert all(runs(pid) for pid, _ in found)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not any(runs(pid) for pid, _ in found))


def test_macos_is_asked_by_its_own_program_which_ends_with_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "caffeinate", "exec sleep 600")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with awake():
        ((pid, words),) = asked(tmp_path, 1)
        assert words == f"-ims -w {os.getpid()}"
    assert not runs(pid)


def test_windows_is_asked_and_told_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    kernel = SimpleNamespace(SetThreadExecutionState=told.append)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    stack = ExitStack()
    stack.enter_context(awake())
    until(lambda: told == [0x80000001])
    closing = threading.Thread(target=stack.close)  # as where a run ends after its loop was left
    closing.start()
    closing.join(20)
    assert told == [0x80000001, 0x80000000]


def test_without_such_a_program_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with awake():
        pass
