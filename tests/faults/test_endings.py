"""Leases of life: nobody outlives whoever they were started by, and whoever goes says so."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from potluck.errors import ScriptError
from potluck.fleet import life, script_errors
from potluck.train.ending import Interrupted
from support.fleet import JOB, Fleet, descendants, port_is_open, still_running
from support.processes import SOURCE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")


@pytest.fixture(autouse=True)
def _hangups_count() -> Iterator[None]:
    """Also where the tests themselves were started with nohup, which all processes below them would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


ORPHANS_S = 10.0
"""After this long nobody may be left."""

# A process that does nothing but live; told to, it catches the interruption and goes on, as a stuck one does.
LIVES = """
import sys, time
from potluck.fleet import life
from potluck.fleet.life import leased
life.GRACE_S = 1.5
parent = int(sys.argv[1]) if sys.argv[1] != "-" else None
try:
    with leased(parent):
        print("alive", flush=True)
        if "stuck" in sys.argv:
            while True:
                try:
                    time.sleep(60)
                except KeyboardInterrupt:
                    pass
        time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[2], "w").write("in order")
"""
STARTS_ANOTHER = """
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]],
                         stdin=subprocess.PIPE if "pipe" in sys.argv else subprocess.DEVNULL,
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def living(
    *words: str, stdout: int | None = subprocess.DEVNULL, before: Callable[[], object] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LIVES, *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment(),
        start_new_session=True,
        preexec_fn=before,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def alive(process: subprocess.Popen[bytes]) -> None:
    """Until its signals are in place; without its output, by the thread that watches."""
    deadline = time.monotonic() + 20
    while len(os.listdir(f"/proc/{process.pid}/task")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)


SIGNALS = [signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]  # Windows has no SIGHUP
linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")


@linux
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_it_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with living("-", str(tmp_path / "end")) as process:
        alive(process)
        process.send_signal(number)
        assert process.wait(ORPHANS_S) == 0
    assert (tmp_path / "end").read_text() == "in order"


@linux
def test_with_nohup_it_stays(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with living("-", str(tmp_path / "end"), stdout=writing, before=ignore) as process:
        os.close(writing)
        alive(process)
        process.send_signal(signal.SIGHUP)
        os.close(reading)
        time.sleep(4 * life.LOOK_S)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(ORPHANS_S) == 0


@linux
@pytest.mark.parametrize("what", ["terminal", "reader"])
def test_it_ends_when_nobody_can_see_it_any_more(what: str, tmp_path: Path) -> None:
    ours, theirs = os.openpty() if what == "terminal" else os.pipe()
    with living("-", str(tmp_path / "end"), stdout=theirs) as process:
        os.close(theirs)
        alive(process)
        assert process.poll() is None
        os.close(ours)
        assert process.wait(ORPHANS_S) == 0
    assert (tmp_path / "end").read_text() == "in order"


@linux
@pytest.mark.parametrize("how", ["pipe", "no pipe"])
def test_it_ends_with_the_parent_however_that_ends(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ANOTHER, LIVES, str(tmp_path / "end"), *how.split()[-1:]]
    if how == "no pipe":
        command[-1] = "nothing"
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert still_running([child], ORPHANS_S) == []
    assert (tmp_path / "end").read_text() == "in order"


@linux
@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_does_not_interrupt_the_goodbye(number: signal.Signals, tmp_path: Path) -> None:
    """A parent that dies is told of twice: its pipe closes, and then comes the signal of the system."""
    slow = LIVES.replace("    open(sys", '    print("leaving", flush=True)\n    time.sleep(1)\n    open(sys')
    command = [sys.executable, "-c", slow, "-", str(tmp_path / "end")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        for word, told in ((b"alive\n", signal.SIGTERM), (b"leaving\n", number)):
            assert process.stdout.readline() == word
            process.send_signal(told)
        assert process.wait(ORPHANS_S) == 0
    assert (tmp_path / "end").read_text() == "in order"


@linux
def test_one_that_does_not_heed_it_is_ended_all_the_same(tmp_path: Path) -> None:
    with living("-", str(tmp_path / "end"), "stuck") as process:
        alive(process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        assert process.wait(ORPHANS_S) == 1
    assert life.GRACE_S + 2 * life.LOOK_S < ORPHANS_S


# -- runs


def test_guests_on_this_machine_end_with_their_host(tmp_path: Path) -> None:
    """However the host goes: here -9, in the middle of a run."""
    with Fleet(tmp_path) as fleet:
        train = fleet.train("--steps", "100000", "--depth", "1", "--view", "plain", guests=2)
        train.wait_until(lambda: fleet.runs.exists() and list(fleet.runs.iterdir()), 30, "run folder")
        fleet.wait_for(train, lambda: fleet.events("guest_joined"), "a guest")
        guests = descendants(train)
        assert len(guests) >= 2
        port = fleet.port
        os.kill(train.pid, signal.SIGKILL)
        assert still_running(guests, ORPHANS_S) == []
        assert not port_is_open(port)


@pytest.mark.timeout(90)
def test_guests_of_another_machine_leave_and_give_up(tmp_path: Path) -> None:
    """Its terminal closes: it says goodbye. The host dies: the guest says so, waits, and gives up."""
    device = ["--device", "paced:0.01", "--micro-batch", "2"]
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "2", *device, arguments=["--until", tmp_path / "never"])
        ann = fleet.guest("ann", *device)
        bob = fleet.guest("bob", *device, "--give-up", "2", "--runs", str(tmp_path / "records"))
        for name in ("ann", "bob"):
            fleet.wait_for_event(host, "guest_joined", name)
        ann.signal(signal.SIGHUP)
        left = fleet.wait_for_event(host, "guest_left", "ann")
        assert left["reason"].startswith("stopped ")
        ann.exits_with(130, deadline_s=ORPHANS_S)
        host.kill()
        bob.exits_with(3, deadline_s=25)
        assert "host gone, waiting (" in bob.stdout()
        assert "the host has been unreachable for 2 s" in bob.stderr()
        assert [p.name for p in (tmp_path / "records").iterdir()] == ["flight-bob-1.jsonl"]
        assert str(tmp_path / "records" / "flight-bob-1.jsonl") in bob.stdout()
        fleet.assert_nothing_left()


@pytest.mark.timeout(240)
def test_a_run_whose_reader_goes_away_is_saved_and_stopped(tmp_path: Path) -> None:
    """`potluck train | head -3`: as with Ctrl-C, and stderr says why and how to go on."""
    words = ["--guests", "0", "--depth", "1", "--sequence", "32", "--batch-tokens", "64", "--steps", "1000000"]
    train = shlex.join([sys.executable, "-m", "potluck", "train", *words, "--runs", str(tmp_path / "runs")])
    done = subprocess.run(
        ["bash", "-c", f"{train} | head -3; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
    )
    (folder,) = (tmp_path / "runs").iterdir()
    end = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    again = f"potluck train --resume {shlex.quote(str(folder))}"
    assert [line for line in done.stderr.splitlines() if line] == [
        "the output pipe was closed: stopping, as with Ctrl-C",
        f"stopped, saved in {folder} after step {end['step']}; resume with: {again}",
    ]
    assert (done.returncode, len(done.stdout.splitlines())) == (130, 3)
    assert (end["event"], end["reason"]) == ("run_end", "interrupted")
    assert (folder / "checkpoints" / f"step-{end['step']:08d}").is_dir()


@pytest.mark.parametrize("gone", [True, False])
def test_a_script_that_prints_to_nobody_was_stopped_and_did_not_fail(
    gone: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script_errors, "reader_is_gone", lambda: gone)
    with pytest.raises(Interrupted if gone else ScriptError), script_errors.running("script.py"):
        raise BrokenPipeError
    assert ("Traceback" in capsys.readouterr().err) != gone
