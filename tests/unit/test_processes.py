"""The tests' own helper for real processes: it must fail loudly and leave nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from support import forks
from support.processes import Processes, ProcessFailure
from support.ranks import ForkedRank, Ranks

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


@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
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


@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
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


SHOWS = """
import atexit, json, os, signal, sys, tempfile, threading
atexit.register(print, "said at the end")
names = [name for name in os.environ if name.startswith("POTLUCK_")]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "names": names, "main": __name__,
    "temporary": tempfile.gettempdir(), "leads": os.getsid(0) == os.getpid(), "threads": threading.active_count(),
    "ctrl_c": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "in": os.readlink("/proc/self/fd/0"),
    "files": sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"})[1:],
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
def test_a_fork_is_like_a_new_process_but_has_torch(tmp_path: Path) -> None:
    script, shown = tmp_path / "shows.py", {}
    script.write_text(SHOWS)
    env = {"POTLUCK_NAME": "given", "TMPDIR": str(tmp_path)}
    for fork in (True, False):
        with Processes(tmp_path / str(fork), fork=fork) as processes:
            process = processes.python(str(script), "a", "b c", env=env, cwd=tmp_path)
            assert isinstance(process._popen, forks.Forked) == (fork and not Path("/dev/nvidiactl").exists())
            process.exits_with(7, 60)
            assert process.stderr() == "to stderr\n"
            shown[fork] = process.stdout()
    assert shown[True] == shown[False]
    assert shown[True].endswith("said at the end\n")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="forks, which CUDA does not survive"
)
def test_what_other_tests_leave_in_the_environment_and_ranks_need_no_import_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does, for good
    (tmp_path / "script.py").write_text("print('torch' in __import__('sys').modules)")
    with Processes(tmp_path) as processes:
        assert processes.python(str(tmp_path / "script.py")).succeeds(60) == "True\n"
    with Ranks(1) as ranks:
        assert isinstance(ranks._ranks[0], ForkedRank)
        assert ranks.call("operator:add", 1) == [1]  # the rank's number and how many there are


STARTS = """
import subprocess, sys
with subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    print(child.communicate(b"word")[0].decode(), child.returncode, flush=True)
words = [sys.executable, "-u", *sys.argv[1:], "stay"]
slow = subprocess.Popen(words, env={"A": "1"}, cwd="/", start_new_session=True, stdout=subprocess.PIPE)
print(slow.stdout.readline().decode(), flush=True)
slow.kill()
print(slow.wait(), flush=True)
"""
STARTED = """
import atexit, json, os, sys, time
atexit.register(print, "said at the end")
files = sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"})[1:]
leads, names = os.getsid(0) == os.getpid(), sorted({"A", "TMPDIR"} & set(os.environ))
print(json.dumps([sys.argv, os.getcwd(), leads, names, files, sys.stdin.read()]), flush=True)
time.sleep(60 if "stay" in sys.argv else 0)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
def test_a_child_of_a_fork_is_like_a_new_process(tmp_path: Path) -> None:
    shown = {}
    for name, text in (("starts.py", STARTS), ("started.py", STARTED)):
        (tmp_path / name).write_text(text)
    words = [str(tmp_path / "starts.py"), str(tmp_path / "started.py"), "a b"]
    for spares in (3, 0):
        with Processes(tmp_path / str(spares)) as processes:
            process = processes.python(*words, env={"TMPDIR": str(tmp_path)}, cwd=tmp_path, children=spares)
            shown[spares] = process.succeeds(60)
    assert shown[3] == shown[0]
    assert "said at the end" in shown[3]
    assert shown[3].splitlines()[-1] == str(-signal.SIGKILL)
