"""`potluck bench` with real ranks: started by itself, checked, and ended with Ctrl-C."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed

from potluck.cli._app import READER_GONE, run
from potluck.dist.config import PREFIX
from potluck.env import DIST_VARIABLES
from potluck.spec.ddp_rows import from_json
from support.processes import Processes

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="starts sessions of POSIX"),
    pytest.mark.timeout(150),  # several times torch is imported, on a machine that may be busy
]


def test_collectives_are_timed_and_checked_on_both_backends(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    with Processes(tmp_path) as processes:
        arguments = ["--against", "gloo", "--sizes", "4K,300000", "--repeats", "2", "--json", str(out)]
        text = processes.potluck("bench", "collectives", *arguments, children=2).succeeds(deadline_s=100)
    rows = json.loads(out.read_text())
    assert [(row["backend"], row["size_bytes"]) for row in rows] == [
        ("potluck", 4096),
        ("gloo", 4096),
        ("potluck", 300_000),
        ("gloo", 300_000),
    ]
    assert all(row["wrong"] == 0 and row["time_s"] > 0 and row["busbw"] > 0 and row["bound_s"] > 0 for row in rows)
    assert "times as fast as gloo" in text
    assert text.count("| potluck") == 2


def test_ddp_learns_the_same_on_both_backends_and_with_any_number_of_processes(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    with Processes(tmp_path) as processes:
        arguments = ["--against", "gloo", "--processes", "1,2", "--depth", "1", "--sequence", "16", "--steps", "2"]
        arguments += ["--global-batch", "8", "--json", str(out)]
        processes.potluck("bench", "ddp", *arguments, children=2).succeeds(deadline_s=120)
    rows = from_json(out.read_text(), str(out))
    assert [(row.label, row.backend) for row in rows] == [
        ("1 process", "none"),
        ("2 processes", "potluck"),
        ("2 processes", "gloo"),
    ]
    assert [row.loss for row in rows] == pytest.approx([rows[0].loss] * 3, rel=1e-5)
    for row in rows[1:]:
        assert row.all_reduce_s
        assert row.computed_s


def test_a_collective_that_torch_has_renamed_is_measured_without_a_warning(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        words = ("--op", "all_gather", "--sizes", "4K", "--repeats", "1")
        bench = processes.potluck("bench", "collectives", *words, children=2)
        bench.succeeds(deadline_s=100)
        assert bench.stderr() == ""


def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        bench = processes.potluck("bench", "collectives", "--sizes", "4K", "--repeats", "10000000", children=2)
        bench.wait_for_text("algbw", deadline_s=100)
        ranks = psutil.Process(bench.pid).children()
        assert len(ranks) == 2
        bench.interrupt()
        bench.exits_with(130, deadline_s=20)
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
        assert bench.stderr().split() == ["interrupted"]  # once, not by every rank


def test_a_reader_that_has_seen_enough_ends_every_rank_without_a_word(tmp_path: Path) -> None:
    """However late the process that started them hears of it: a rank that ended by itself would be reported."""
    sizes = ",".join(str(4 * (1000 + n)) for n in range(2000))  # a line at a time, for longer than the test takes
    command = [sys.executable, "-m", "potluck", "bench", "collectives", "--sizes", sizes, "--repeats", "50"]
    errors = tmp_path / "errors"
    hears = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # with nohup it would go on unread
    with (
        errors.open("wb") as told,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, preexec_fn=hears) as bench,
    ):
        assert bench.stdout is not None
        assert bench.stdout.readline().startswith(b"# all_reduce, 2 ranks")
        ranks = psutil.Process(bench.pid).children()
        assert len(ranks) == 2
        bench.send_signal(signal.SIGSTOP)
        bench.stdout.close()
        psutil.wait_procs(ranks, timeout=1)
        bench.send_signal(signal.SIGCONT)
        assert bench.wait(20) == READER_GONE
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
    assert errors.read_text() == ""


def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        wrong = processes.potluck("bench", "collectives", "--sizes", "lots")
        wrong.exits_with(2, deadline_s=30)
        assert "4K:256M" in wrong.stderr()
        wrong = processes.potluck("bench", "ddp", "--processes", "two")
        wrong.exits_with(2, deadline_s=30)
        assert "1,2,4" in wrong.stderr()


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (
            ("collectives", "--backend", "foo"),
            "--backend foo: torch.distributed knows no",
            "here are potluck, gloo",
        ),
        (("collectives", "--backend", "ucc"), "--backend ucc: the installed torch", "the backends here are"),
        (("ddp", "--against", "glo"), "--against glo: torch.distributed knows no", "did you mean gloo?"),
        (("ddp", "--backend", ""), "--backend : torch.distributed knows no", "here are potluck"),
    ],
)
def test_a_backend_that_is_not_here_is_refused_once_and_with_a_hint_that_fits(
    arguments: tuple[str, ...],
    said: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if arguments[-1] == "ucc" and torch.distributed.is_ucc_available():
        pytest.skip("this torch has it")
    monkeypatch.setattr("potluck.cli.bench.run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    monkeypatch.delenv("RANK", raising=False)
    assert run(["bench", *arguments]) == 2
    error, told, page = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {said}")
    assert hint in told
    assert "GLOO_SOCKET_IFNAME" not in told
    assert page == "see: potluck explain bad-input"


WRONG = {
    "TRANSPORT": "pigeon",
    "ADDRESS": "10.255.1.1",
    "INTERFACE": "no-such",
    "PORT_BASE": "80",
    "CHUNK_BYTES": "1",
    "SMALL_BYTES": "-1",
    "COPY_THREADS": "-1",
    "ALGORITHM": "tree",
    "COMPRESSION": "int3",
    "CHECKSUM": "maybe",
    "ENCRYPTION": "maybe",
    "TIMEOUT_S": "0",
    "CONNECT_TIMEOUT_S": "soon",
    "HEARTBEAT_S": "0",
    "HEARTBEAT_TIMEOUT_S": "0.2",
    "LOG_LEVEL": "loud",
}


@pytest.mark.parametrize("verb", ["collectives", "ddp"])
def test_a_wrong_variable_of_the_backend_is_said_once_and_before_anything_starts(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.cli.bench.run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    monkeypatch.delenv("RANK", raising=False)
    assert {PREFIX + name for name in WRONG} == set(DIST_VARIABLES)
    for name, value in WRONG.items():
        with monkeypatch.context() as patch:
            patch.setenv(PREFIX + name, value)
            assert run(["bench", verb, "--processes", "2"]) == 2
        error, told, page = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: {PREFIX}{name}=")
        assert value in error
        assert told.startswith("hint: ")
        assert page == "see: potluck explain bad-config"


def test_a_backend_that_takes_no_tensors_of_the_cpu_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nccl, where it is built in."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert run(["bench", "collectives", "--against", "nccl"]) == 2
    told = capsys.readouterr().err
    assert "--against nccl: it does not take CPU tensors" in told
    assert "the backends here are potluck, gloo; or add --device cuda" in told
