"""Runs of torch that fail for real, and the doctor that reads what they wrote."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from potluck.doctor.log import read_log
from potluck.doctor.log_text import Part
from potluck.fleet.ranks import rank_environment
from support.processes import Processes, TestProcess, _environment

pytestmark = pytest.mark.timeout(150)
LIMIT_S = 90.0
SCRIPT = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
what = sys.argv[1]
patience = datetime.timedelta(seconds=2 if what == "uneven" else 60)
dist.init_process_group("gloo", timeout=patience)
rank, x = dist.get_rank(), torch.ones(4)
for step in range(3 + (what in ("uneven", "fewer") and rank == 0)):
    if what == "killed" and step == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises" and step == 1 and rank == 1:
        {}["label"]
    dist.all_reduce(x)
    print("rank", rank, "step", step, "loss", float(x[0]), flush=True)
while what == "uneven" and not os.path.exists(sys.argv[2]):
    time.sleep(0.01)  # stays, having seen all of its data, until the test lets it go
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    return path


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def two_ranks(folder: Path, script: Path, what: str) -> list[str]:
    """What each of two ranks wrote; the second is let go when the first has ended."""
    port, go = int(free_port()), folder / "go"
    with Processes(folder) as processes:
        ranks = [
            processes.python(str(script), what, str(go), env=rank_environment(r, 2, "127.0.0.1", port), merged=True)
            for r in range(2)
        ]
        ranks[0].wait(LIMIT_S)
        go.touch()
        ranks[1].wait(LIMIT_S)
        return [rank.stdout() for rank in ranks]


def torchrun(folder: Path, script: Path, what: str, port: str) -> TestProcess:
    """A run of two ranks that has ended; nothing says how many threads each may have."""
    with Processes(folder) as processes:
        words = ("--master-port", port, str(script), what)
        run = processes.torchrun(*words, env={"OMP_NUM_THREADS": None}, merged=True)
        run.wait(LIMIT_S)
        return run


def codes(text: str) -> list[str]:
    return [finding.code for finding in read_log([Part(1, text)], "run.log").findings]


def doctor(folder: Path, *arguments: str, text: str | None = None) -> tuple[int, Mapping[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "potluck", "doctor", *arguments],
        env=_environment({}),
        cwd=folder,
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT_S,
    )
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout) if "--json" in arguments else {}, done.stdout


def test_a_rank_with_more_batches(script: Path, tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path, script, "uneven")
    assert codes(first) == ["waited-for-a-rank"]
    assert "Timed out waiting 2000ms" in first
    (finding,) = read_log([Part(1, first)], "run.log").findings
    assert 16 in finding.pains
    assert "with model.join():" in finding.fix
    assert codes(second) == []


def test_a_rank_that_is_killed(script: Path, tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path, script, "killed")
    assert codes(first) == ["other-rank-gone"]
    assert codes(second) == []


def test_torchrun_with_a_worker_that_is_killed_and_the_command(script: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, script, "killed", free_port())
    assert done.returncode == 1
    found = codes(done.stdout())
    assert found[0] == "worker-killed"
    # Its other worker may have been ended before it could write anything.
    assert set(found[1:]) <= {"other-rank-gone", "one-thread-each"}
    done.out.rename(tmp_path / "run.log")
    status, table, _ = doctor(tmp_path, "--error", "run.log", "--json")
    assert status == 1
    assert table["healthy"] is False
    first = table["log"]["findings"][0]
    assert (first["code"], first["machine"]) == ("worker-killed", "run.log")
    assert "rank 1" in first["what"]
    assert {17, 18} <= set(first["pains"])
    assert table["fine"]  # the machine was looked at, too
    status, _, shown = doctor(tmp_path, "--error", "-", text=(tmp_path / "run.log").read_text())
    assert status == 1
    assert shown.index("killed from outside") < shown.index("as it is now") < shown.index("interfaces of")
    assert "cannot happen" in shown


def test_torchrun_with_a_worker_that_raises_names_its_exception_first(script: Path, tmp_path: Path) -> None:
    text = torchrun(tmp_path, script, "raises", free_port()).stdout()
    first, *others = read_log([Part(1, text)], "run.log").findings
    assert first.code == "rank-raised", text
    assert first.what.startswith("rank 1: KeyError: 'label' (line ")
    assert "raised in train.py, line " in first.how
    assert {f.code for f in others} <= {"other-rank-gone", "one-failed-all-ended", "one-thread-each"}


def test_torchrun_with_a_worker_that_has_fewer_batches_and_ends(script: Path, tmp_path: Path) -> None:
    text = torchrun(tmp_path, script, "fewer", free_port()).stdout()
    found = read_log([Part(1, text)], "run.log").findings
    assert found[0].code == "rank-ended-early", text
    assert "rank 0 lost another rank" in found[0].what
    assert "with model.join():" in found[0].fix
    assert "drop_last=True" in found[0].fix


def test_a_port_that_is_taken(script: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        text = torchrun(tmp_path, script, "fine", port).stdout()
    assert codes(text) == ["port-in-use", "one-thread-each"]
    assert port in read_log([Part(1, text)], "run.log").findings[0].fix


def test_fewer_processes_than_were_promised(tmp_path: Path) -> None:
    script = tmp_path / "store.py"
    code = "import datetime; from torch.distributed import TCPStore\n"
    code += f"TCPStore('127.0.0.1', {free_port()}, 3, True, timeout=datetime.timedelta(seconds=1))"
    script.write_text(code)
    with Processes(tmp_path) as processes:
        process = processes.python(str(script))
        process.wait(LIMIT_S)
    assert codes(process.stderr()) == ["not-everybody-came"]
    assert "1 of 3 processes" in read_log([Part(1, process.stderr())], "x").findings[0].what


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGHUP")
def test_a_torchrun_whose_terminal_is_closed(script: Path, tmp_path: Path) -> None:
    """As a lost ssh does it: the hang-up goes to all of the terminal's processes."""
    sleeper = script.parent / "sleep.py"
    sleeper.write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    with Processes(tmp_path) as processes:
        run = processes.torchrun("--master-port", free_port(), str(sleeper), ranks=1, merged=True)
        run.wait_for_text("begun", LIMIT_S)
        run.signal(signal.SIGHUP)
        run.wait(LIMIT_S)
    assert codes(run.stdout()) == ["terminal-gone"], run.stdout()


def test_a_healthy_run_has_no_findings(script: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, script, "fine", free_port())
    assert done.returncode == 0, done.stdout()
    assert codes(done.stdout()) == []
    done.out.rename(tmp_path / "run.log")
    status, _, shown = doctor(tmp_path, "--error", "run.log")
    assert status == 0
    assert "no known failure in this log" in shown
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" not in shown
