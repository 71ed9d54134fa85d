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
from potluck.doctor.log_text import Part, decoded

pytestmark = pytest.mark.timeout(150)
LIMIT_S = 90.0
SOURCE = str(Path(__file__).resolve().parents[2] / "src")
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
if what == "uneven":
    sys.stdin.read()  # stays, having seen all of its data, until the test lets it go
dist.destroy_process_group()
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**kept, "PYTHONPATH": SOURCE, "PYTHONUTF8": "1", **more}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    return path


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def two_ranks(script: Path, what: str) -> list[str]:
    """What each of two ranks wrote; the second is let go when the first has ended."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), what],
            env=environment(**common, RANK=str(rank)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        # The input stays open for the one that waits; communicate() would close it.
        assert ranks[0].stdout is not None
        ranks[0].wait(LIMIT_S)
        return [ranks[0].stdout.read().decode(), ranks[1].communicate(timeout=LIMIT_S)[0].decode()]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def torchrun(script: Path, what: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, str(script), what]
    return subprocess.run(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
    )


def codes(text: str | bytes) -> list[str]:
    text = decoded(text) if isinstance(text, bytes) else text
    return [finding.code for finding in read_log([Part(1, text)], "run.log").findings]


def doctor(folder: Path, *arguments: str, text: str | None = None) -> tuple[int, Mapping[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "potluck", "doctor", *arguments],
        env=environment(),
        cwd=folder,
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT_S,
    )
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout) if "--json" in arguments else {}, done.stdout


def test_a_rank_with_more_batches(script: Path) -> None:
    first, second = two_ranks(script, "uneven")
    assert codes(first) == ["waited-for-a-rank"]
    assert "Timed out waiting 2000ms" in first
    (finding,) = read_log([Part(1, first)], "run.log").findings
    assert 16 in finding.pains
    assert "with model.join():" in finding.fix
    assert codes(second) == []


def test_a_rank_that_is_killed(script: Path) -> None:
    first, second = two_ranks(script, "killed")
    assert codes(first) == ["other-rank-gone"]
    assert codes(second) == []


def test_torchrun_with_a_worker_that_is_killed_and_the_command(script: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    done = torchrun(script, "killed", "--master-port", free_port())
    assert done.returncode == 1
    log.write_bytes(done.stdout)
    found = codes(done.stdout)
    assert found[0] == "worker-killed"
    # Its other worker may have been ended before it could write anything.
    assert set(found[1:]) <= {"other-rank-gone", "one-thread-each"}
    status, table, _ = doctor(tmp_path, "--error", "run.log", "--json")
    assert status == 1
    assert table["healthy"] is False
    first = table["log"]["findings"][0]
    assert (first["code"], first["machine"]) == ("worker-killed", "run.log")
    assert "rank 1" in first["what"]
    assert {17, 18} <= set(first["pains"])
    assert table["fine"]  # the machine was looked at, too
    status, _, shown = doctor(tmp_path, "--error", "-", text=done.stdout.decode())
    assert status == 1
    assert shown.index("killed from outside") < shown.index("as it is now") < shown.index("interfaces of")
    assert "cannot happen" in shown


def test_torchrun_with_a_worker_that_raises_names_its_exception_first(script: Path) -> None:
    text = decoded(torchrun(script, "raises", "--master-port", free_port()).stdout)
    first, *others = read_log([Part(1, text)], "run.log").findings
    assert first.code == "rank-raised", text
    assert first.what.startswith("rank 1: KeyError: 'label' (line ")
    assert "raised in train.py, line " in first.how
    assert {f.code for f in others} <= {"other-rank-gone", "one-failed-all-ended", "one-thread-each"}


def test_torchrun_with_a_worker_that_has_fewer_batches_and_ends(script: Path) -> None:
    done = torchrun(script, "fewer", "--master-port", free_port())
    found = read_log([Part(1, decoded(done.stdout))], "run.log").findings
    assert found[0].code == "rank-ended-early", done.stdout.decode()
    assert "rank 0 lost another rank" in found[0].what
    assert "with model.join():" in found[0].fix
    assert "drop_last=True" in found[0].fix


def test_a_port_that_is_taken(script: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = torchrun(script, "fine", "--master-port", port)
    assert codes(done.stdout) == ["port-in-use", "one-thread-each"]
    assert port in read_log([Part(1, done.stdout.decode())], "run.log").findings[0].fix


def test_fewer_processes_than_were_promised() -> None:
    code = "import datetime; from torch.distributed import TCPStore\n"
    code += f"TCPStore('127.0.0.1', {free_port()}, 3, True, timeout=datetime.timedelta(seconds=1))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert codes(done.stderr) == ["not-everybody-came"]
    assert "1 of 3 processes" in read_log([Part(1, done.stderr)], "x").findings[0].what


def test_a_torchrun_whose_terminal_is_closed(script: Path) -> None:
    """As a lost ssh does it: the hang-up goes to all of the terminal's processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", free_port()]
    sleeper = script.parent / "sleep.py"
    sleeper.write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [*command, str(sleeper)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        while b"begun" not in (line := process.stdout.readline()):
            assert line, "it ended before it began"
        os.kill(process.pid, signal.SIGHUP)
        told = process.communicate(timeout=LIMIT_S)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert codes(told) == ["terminal-gone"], told.decode()


def test_a_healthy_run_has_no_findings(script: Path, tmp_path: Path) -> None:
    done = torchrun(script, "fine", "--master-port", free_port())
    assert done.returncode == 0, done.stdout
    assert codes(done.stdout) == []
    (tmp_path / "run.log").write_bytes(done.stdout)
    status, _, shown = doctor(tmp_path, "--error", "run.log")
    assert status == 0
    assert "no known failure in this log" in shown
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" not in shown
