"""`potluck lab shell` and `potluck lab exec`: one rig for all who use it, statuses and Ctrl-C as without it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from potluck.lab.permission import why_not
from support.rigs import SOURCE, assert_nothing_is_left, processes, the_state, wait_until

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(60),
]

PYTHON = (sys.executable, "-I", "-S")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of the test's own for state files; it also marks every process that the test starts."""
    path = tmp_path / "runtime"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    return path


def rig_file(tmp_path: Path) -> str:
    path = tmp_path / "pair.toml"
    path.write_text(
        'name = "a pair"\n[[machine]]\nname = "desk"\nrole = "host"\nseconds_per_sample = 0.15\n'
        '[[machine]]\nname = "laptop"\nseconds_per_sample = 0.6\nlink_mbit = 40\n'
    )
    return str(path)


def lab(verb: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`potluck lab VERB …`"""
    program = "import sys; from potluck.cli._app import main; main(['lab', *sys.argv[1:]])"
    return subprocess.Popen(
        [sys.executable, "-c", program, verb, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], seconds: float = 20.0) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out + err


def test_two_commands_are_on_the_same_rig_and_statuses_pass_through(tmp_path: Path, runtime: Path) -> None:
    pair = rig_file(tmp_path)
    greet = (
        "import os, socket; s = socket.create_server(('10.77.0.1', 7777)); print('here', flush=True);"
        "c = s.accept()[0]; c.sendall(os.environ['POTLUCK_NAME'].encode()); raise SystemExit(42)"
    )
    ask = (
        "import os, socket; s = socket.create_connection(('10.77.0.1', 7777), 5); "
        "print(s.recv(99).decode(), *map(os.environ.get, ('POTLUCK_NAME', 'POTLUCK_DEVICE')), flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    greeting = lab("exec", pair, "desk", "--", *PYTHON, "-c", greet)
    assert greeting.stdout is not None
    assert greeting.stdout.readline() == "here\n"
    first = the_state(runtime, "a-pair").supervisor
    assert finish(lab("exec", pair, "laptop", "--", *PYTHON, "-c", ask)) == (137, "desk laptop paced:0.6\n")
    assert finish(greeting) == (42, "")
    # One after the other, too: the rig stays for a moment.
    assert finish(lab("exec", pair, "desk", "true")) == (0, "")
    assert the_state(runtime, "a-pair").supervisor == first
    assert_nothing_is_left(runtime)


def test_a_shell_says_where_one_is_and_what_it_leaves_running_ends_with_the_rig(
    tmp_path: Path, runtime: Path
) -> None:
    shell = lab(
        "shell", rig_file(tmp_path), "laptop", stdin=subprocess.PIPE, env={**os.environ, "SHELL": "/bin/sh"}
    )
    out, err = shell.communicate(
        "nohup sleep 1000 >/dev/null 2>&1 &\necho I am $POTLUCK_NAME\nexit 5\n", timeout=20
    )
    assert shell.returncode == 5
    assert out == "I am laptop\n"
    for words in ("this is laptop", "10.77.0.2", "--device paced:0.6", "40 Mbit/s", "desk (host) is at 10.77.0.1"):
        assert words in err
    assert any("sleep" in process for process in processes(runtime))
    assert_nothing_is_left(runtime)


def test_ctrl_c_is_for_the_command(tmp_path: Path, runtime: Path) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    process = lab("exec", rig_file(tmp_path), "desk", "--", "sh", "-c", script, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process) == (9, "caught\n")
    assert_nothing_is_left(runtime)


def test_a_killed_exec_takes_its_command_along(tmp_path: Path, runtime: Path) -> None:
    process = lab(
        "exec", rig_file(tmp_path), "desk", "--", "sh", "-c", "echo ready; sleep 1000", start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    finish(process)
    assert_nothing_is_left(runtime)


def test_ctrl_c_while_a_rig_comes_up_leaves_nothing(tmp_path: Path, runtime: Path) -> None:
    pair = rig_file(tmp_path)
    interrupted = 0
    for delay_s in (0.0, 0.03, 0.06, 0.1, 0.15, 0.25):
        process = lab("exec", pair, "desk", "--", "sleep", "0.3", start_new_session=True)
        # From the moment at which it uses the folder of state files.
        wait_until(lambda: any(runtime.glob("*")), 10)
        time.sleep(delay_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        status, words = finish(process)
        assert "Traceback" not in words
        interrupted += status == 130
        assert_nothing_is_left(runtime)
        shutil.rmtree(runtime)
        runtime.mkdir(mode=0o700)
    assert interrupted >= 3
