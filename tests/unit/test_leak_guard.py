"""The guard against leaks in conftest.py catches what it promises to catch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.processes import Processes

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAKY = """
import os, subprocess, sys, threading, time
import zmq

def sleeper(name=None, daemon=False):
    threading.Thread(target=time.sleep, args=(6,), name=name, daemon=daemon).start()

def test_thread(): sleeper()
def test_named_thread(): sleeper("potluck-io", daemon=True)
def test_process(): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
kept = []
def test_context():
    # A message that nobody takes: closing would wait for ever.
    kept.append(zmq.Context())
    socket = kept[0].socket(zmq.DEALER)
    socket.connect("tcp://127.0.0.1:9")
    socket.send(b"x")
def test_variable(): os.environ["POTLUCK_NAME"] = "left"
def test_clean():
    assert "POTLUCK_NAME" not in os.environ
    zmq.Context().term()
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    subprocess.Popen([sys.executable, "-c", ""])
"""


@pytest.mark.slow
def test_each_kind_of_leak_fails_its_test_and_only_that(tmp_path: Path) -> None:
    # The real grace would make this test wait for each leak.
    text, times = re.subn(r"^GRACE_S = .*$", "GRACE_S = 1.0", CONFTEST.read_text(), flags=re.MULTILINE)
    assert times == 1
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    with Processes(tmp_path / "logs") as processes:
        words = ("-m", "pytest", "-rE", "-p", "no:cacheprovider", str(tmp_path))
        pytest_run = processes.python(*words, cwd=tmp_path, env={"PYTHONPATH": str(CONFTEST.parent)})
        pytest_run.exits_with(1, 50)
        out = pytest_run.stdout()
    assert sorted(re.findall(r"^ERROR \S+::(\w+)", out, re.MULTILINE)) == [
        "test_context",
        "test_named_thread",
        "test_process",
        "test_thread",
        "test_variable",
    ], out
    assert "6 passed, 5 errors" in out
