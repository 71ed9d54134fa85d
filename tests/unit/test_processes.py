"""The tests' own helper for real processes: it must fail loudly and leave nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from support.processes import Processes, ProcessFailure

SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


def test_output_and_status(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        process = processes.python("-c", "print('words'); import sys; print('more', file=sys.stderr)")
        assert process.succeeds(10) == "words\n"
        assert process.stderr() == "more\n"
        other = processes.python("-c", "raise SystemExit(3)")
        other.exits_with(3, 10)


def test_potluck_runs_from_this_source(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        assert processes.potluck("--version").succeeds(10).startswith("potluck ")


def test_a_wrong_status_shows_the_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(ProcessFailure, match="ended with 3, expected 0") as caught,
        Processes(tmp_path) as processes,
    ):
        processes.python("-c", "print('why it failed'); raise SystemExit(3)", name="worker").succeeds(10)
    assert "why it failed" in str(caught.value)
    assert "worker stdout" in capsys.readouterr().out


def test_a_deadline_is_hard(tmp_path: Path) -> None:
    begun = time.monotonic()
    with Processes(tmp_path) as processes:
        process = processes.python("-c", SLEEP)
        with pytest.raises(ProcessFailure, match="had not ended after"):
            process.wait(0.3)
        assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - begun < 10


def test_waiting_for_text(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        process = processes.python("-c", SLEEP)
        assert process.wait_for_text(r"re(ad)y", 10)[1] == "ad"
        with pytest.raises(ProcessFailure, match="no 'never' in its output"):
            process.wait_for_text("never", 0.1)
        ended = processes.python("-c", "print('short')")
        with pytest.raises(ProcessFailure, match="ended with 0 before"):
            ended.wait_for_text("never", 10)


def test_descendants_die_too(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with Processes(tmp_path) as processes:
        process = processes.python("-c", f"{child}; print(p.pid, flush=True); p.wait()")
        pid = int(process.wait_for_text(r"\d+", 10)[0])
        process.signal(signal.SIGKILL)
        process.wait(10)
        assert psutil.pid_exists(pid)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupt_stop_and_resume(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        process = processes.python("-c", SLEEP)
        process.wait_for_text("ready", 10)
        process.stop()
        process.wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 5, "stop")
        process.resume()
        process.interrupt()
        assert process.wait(10) == -signal.SIGINT


def test_settings_of_the_developer_do_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_NAME", "mine")
    show = "import os; print(os.environ.get('POTLUCK_NAME'))"
    with Processes(tmp_path) as processes:
        assert processes.python("-c", show).succeeds(10) == "None\n"
        assert processes.python("-c", show, env={"POTLUCK_NAME": "given"}).succeeds(10) == "given\n"
    assert os.environ["POTLUCK_NAME"] == "mine"
