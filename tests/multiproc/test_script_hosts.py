"""A plain Python script hosts: a guest joins it, and is told whether the script finished, failed or was stopped."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import TORCH_STARTS_S, Fleet, port_is_open
from support.processes import SOURCE, TestProcess

DEADLINE_S = 30.0

SCRIPT = """
import sys, threading
import torch
from torch import nn
import potluck

runs, end = sys.argv[1:]
run = potluck.start(
    host=True, bind="127.0.0.1", device="cpu", threads=1, wait_for=1, wait_s=60, view="plain", runs=runs,
    log=("tensorboard",),
)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples = torch.randn(64, 4)
for step in run.steps(
    model, optimizer, samples, global_batch=8, micro_batch=4, steps=6 if end == "finish" else None
):
    for x in step:
        step.backward(model(x).square().mean())
    if end == "fail" and run.is_host and step.index == 3:
        raise ValueError("boom")
print("after the loop:", run.role, [t.name for t in threading.enumerate()])
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet") as fleet:
        yield fleet


def begun(fleet: Fleet, end: str, wait_for: int = 1) -> tuple[TestProcess, TestProcess]:
    """The script as host, and a guest of it."""
    script = fleet.runs.parent / "train.py"
    script.write_text(SCRIPT.replace("wait_for=1", f"wait_for={wait_for}"))
    host = fleet.python(str(script), str(fleet.runs), end, name="host")
    found = host.wait_for_text(r"(?m)^  potluck join (potluck\d+-\S+)$", TORCH_STARTS_S)
    assert (fleet.folder / "token").read_text().strip() == found[1]
    return host, fleet.guest("ann")


def last_event(fleet: Fleet) -> tuple[str, str]:
    event = json.loads((fleet.folder / "events.jsonl").read_text().splitlines()[-1])
    return event["event"], event["reason"]


def test_to_the_end_of_its_loop(fleet: Fleet) -> None:
    host, ann = begun(fleet, "finish")
    said = host.succeeds(DEADLINE_S)
    ann.succeeds(DEADLINE_S)
    assert "the run is over: finished" in ann.stdout()
    assert "computing train.py from the host" in ann.stdout()
    assert said.endswith("after the loop: host ['MainThread']\n")
    assert "after the loop" not in ann.stdout()
    assert fleet.events("guest_joined", "ann")
    assert last_event(fleet) == ("run_end", "finished")
    assert not port_is_open(fleet.port)
    (series,) = fleet.runs.parent.rglob("events.out.*")  # only the host writes
    assert series.parent == fleet.folder / "tensorboard"
    assert b"share/ann" in series.read_bytes()


def test_an_exception_in_the_loop(fleet: Fleet) -> None:
    host, ann = begun(fleet, "fail")
    host.exits_with(1, DEADLINE_S)
    ann.exits_with(1, DEADLINE_S)
    assert "ValueError: boom" in host.stderr()
    assert "the run failed on its host" in ann.stderr()
    assert last_event(fleet) == ("run_end", "failed")


def test_a_script_that_ends_without_a_loop(fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.split("model =")[0])
    fleet.python(str(script), str(fleet.runs), "", name="host").succeeds(DEADLINE_S)
    assert list(fleet.runs.iterdir()) == [], "closed at its exit, and there is nothing to keep"


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_in_the_loop(fleet: Fleet) -> None:
    host, ann = begun(fleet, "never")
    fleet.wait_for_step(host, 3)
    host.signal(signal.SIGINT)
    assert host.wait(DEADLINE_S) == -signal.SIGINT, "as any Python script that is interrupted: 130 in a shell"
    ann.succeeds(DEADLINE_S)
    assert "the run is over: interrupted" in ann.stdout()
    assert f"resume with: potluck.start(host=True, resume='{fleet.folder}')" in host.stderr()
    assert last_event(fleet) == ("run_end", "interrupted")
    assert list((fleet.folder / "checkpoints").glob("step-*"))


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_while_it_waits_for_guests(fleet: Fleet) -> None:
    host, ann = begun(fleet, "never", wait_for=2)
    host.wait_for_text("ann .* is joining", TORCH_STARTS_S)
    host.signal(signal.SIGINT)
    assert host.wait(DEADLINE_S) == -signal.SIGINT
    ann.succeeds(DEADLINE_S)
    assert "the run is over: interrupted" in ann.stdout()


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("reader", ["head -3", "true"], ids=["head", "nobody"])
def test_a_script_whose_reader_goes_away_is_saved_and_stopped(reader: str, tmp_path: Path) -> None:
    """Also where it is gone before the join line is printed: a busy machine may be that late for `head`."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("wait_for=1", "wait_for=0"))
    words = shlex.join([sys.executable, "train.py", "runs", "never"])
    hears = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # with nohup it would go on unread
    done = subprocess.run(
        ["bash", "-c", f"{words} | {reader}; exit ${{PIPESTATUS[0]}}"],
        preexec_fn=hears,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    (folder,) = (tmp_path / "runs").iterdir()
    end = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["reason"]) == ("run_end", "interrupted")
    assert (folder / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    assert "the output pipe was closed: stopping, as with Ctrl-C" in done.stderr
    assert "resume with: potluck.start(host=True, resume=" in done.stderr
    assert done.returncode == 130


@pytest.mark.parametrize("host", [False, True])
def test_start_leaves_the_random_numbers_of_the_script_as_they_were(host: bool, tmp_path: Path) -> None:
    """A new process: what is imported first, and only once, may draw some."""
    options = f"host=True, bind='127.0.0.1', view='quiet', runs={str(tmp_path)!r}" if host else ""
    script = f"""
import random, potluck
random.seed(1)
before = random.getstate()
run = potluck.start({options})
assert random.getstate() == before
run.close()
"""
    file = tmp_path / "seeded.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


TWO_LOOPS = """
import sys
import torch
from torch import nn
import potluck

runs, how = sys.argv[1:]
run = potluck.start(host=True, bind="127.0.0.1", device="cpu", threads=1, view="plain", runs=runs)


def loop():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in run.steps(model, optimizer, torch.ones(8, 4), global_batch=4, steps=3):
        for x in step:
            step.backward(model(x).square().mean())
        yield step.number


print(list(zip(loop(), loop())) if how == "at once" else [*loop(), *loop()])
"""


@pytest.mark.parametrize("command", [[], ["-m", "potluck", "host", "--bind", "127.0.0.1"]], ids=["start", "host"])
def test_two_loops_at_once_are_refused_with_one_sentence(command: list[str], fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_LOOPS)
    own = ["--runs", str(fleet.runs)] if command else []
    host = fleet.python(
        *command, str(script), *own, *(["--"] if command else []), str(fleet.runs), "at once", name="h"
    )
    assert host.wait(DEADLINE_S) != 0
    assert "run.steps() was called while an earlier run.steps() of this program is still open" in host.stderr()
    assert "end the first loop before the second one begins" in host.stderr()
    assert last_event(fleet) == ("run_end", "failed")


def test_a_loop_after_the_first_one_is_a_new_run(fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_LOOPS)
    host = fleet.python(str(script), str(fleet.runs), "in turn", name="host")
    assert host.succeeds(DEADLINE_S).endswith("[1, 2, 3, 1, 2, 3]\n")
    assert len(list(fleet.runs.iterdir())) == 2
