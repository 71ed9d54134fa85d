"""Rows of `potluck bench ddp` from several machines: their files, their table, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.cli._app import run
from potluck.errors import UserError
from potluck.report import ddp_table
from potluck.spec.ddp_rows import DdpRow, from_json, merged, share, trained

ROW: dict[str, Any] = {
    "backend": "none", "world": 1, "machines": 1, "kind": "cpu", "gpus": 0, "device": "Some CPU", "where": "",
    "depth": 4, "sequence": 128, "steps": 8, "global_batch": 16, "tokens_per_s": 3200.0, "step_s": 0.64,
    "gradient_bytes": 13_000_000, "all_reduce_s": None, "computed_s": None, "exposed_s": None, "loss": 5.6,
}  # fmt: skip
TWO = ROW | {"backend": "potluck", "world": 2, "where": "memory", "all_reduce_s": 0.007, "computed_s": 0.002}
PAIR = TWO | {"machines": 2, "where": "tcp", "all_reduce_s": 0.15, "computed_s": 0.11, "exposed_s": 0.1}
GPU = ROW | {"kind": "cuda", "gpus": 1, "device": "NVIDIA H200 140 GB", "tokens_per_s": 400_000.0, "loss": 5.60001}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


def test_files_of_several_machines_become_one_table_and_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = write(tmp_path / "gpu.json", GPU)
    cpu = write(tmp_path / "cpu.json", PAIR, TWO | {"world": 4}, ROW, TWO)
    both, picture = tmp_path / "both.json", tmp_path / "table.svg"
    assert run(["bench", "ddp", "--merge", gpu, cpu, "--json", str(both), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:7]]
    assert [row[0] for row in cells] == ["1 process", "2 processes", "4 processes", "2 machines", "single GPU"]
    assert cells[3][3:] == ["3,200", "110 ms", "150 ms", "5.60000"]
    assert cells[4][1:] == ["NVIDIA H200 140 GB", "none", "400,000", "–", "–", "5.60001"]
    assert "16 samples a step" in lines[-1]
    assert "differ by at most 1e-05" in lines[-1]
    assert "single GPU" in picture.read_text()
    # What was merged can be merged again.
    assert run(["bench", "ddp", "--merge", str(both)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is not a JSON file"),
        ("{}", "has no rows"),
        ("[]", "has no rows"),
        (json.dumps([ROW, {"world": 2}]), "row 2: backend is missing"),
        (json.dumps([ROW | {"tokens_per_s": -1}]), "row 1: tokens_per_s is -1"),
        (json.dumps([ROW | {"tokens_per_s": "fast"}]), "row 1: tokens_per_s is 'fast'"),
        (json.dumps([ROW | {"loss": float("nan")}]), "row 1: loss is nan"),
        (json.dumps([ROW | {"kind": "tpu"}]), "row 1: kind is 'tpu'"),
        (json.dumps([7]), "row 1"),
        (json.dumps([ROW | {"global_batch": 32}]), "1 process trained depth 4, sequence 128, 32 samples a step"),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(
    text: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good.json", ROW), tmp_path / "bad.json"
    bad.write_text(text)
    assert run(["bench", "ddp", "--merge", good, str(bad)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {bad}")
    assert what in err.splitlines()[0]
    assert "potluck bench ddp --global-batch" in err or "the same --global-batch" in err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--merge"], "--merge needs files"),
        (["a.json"], "a.json: files are only read with --merge"),
        (["--merge", "no-such.json"], "cannot read no-such.json"),
        (["--batch", "2", "--global-batch", "4"], "exclude each other"),
        (["--global-batch", "6"], "--global-batch 6 cannot be divided among 4 processes"),
        (["--device", "tpu"], "--device tpu: there is no such device"),
        (["--device", "cuda", "--lab", "100"], "--lab measures on the CPU"),
        (["--merge", "a.json", "--plot", "table.pdf"], "cannot draw table.pdf"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_measured(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert run(["bench", "ddp", *words]) == 2
    assert what in capsys.readouterr().err.splitlines()[0]


def test_rows_are_named_for_what_they_are() -> None:
    def label(**changes: Any) -> str:
        return from_json(json.dumps([ROW | changes]), "x")[0].label

    assert label(world=8, machines=2) == "2 machines, 8 processes"
    assert label(world=2, machines=2, kind="cuda", gpus=2) == "2 machines with GPUs"
    assert label(world=4, kind="cuda", gpus=4) == "4 GPUs"
    assert label(world=2, kind="cuda", gpus=1) == "single GPU, 2 processes"
    assert label(kind="mps", gpus=1) == "single GPU"


def test_two_backends_with_the_same_number_of_processes_keep_their_rows() -> None:
    found = merged([("a", from_json(json.dumps([TWO, TWO | {"backend": "gloo"}]), "a"))])
    assert [row.backend for row in found] == ["potluck", "gloo"]
    assert "gloo" in ddp_table.markdown(found)[3]


def test_a_picture_of_growing_batches_says_what_each_process_has() -> None:
    rows = from_json(json.dumps([ROW | {"global_batch": 4}, TWO | {"global_batch": 8}]), "x")
    assert trained(rows) == "depth 4, sequence 128, 4 samples a process and step, 8 steps"
    assert trained(rows[1:]) == "depth 4, sequence 128, 8 samples a step, 8 steps"


def test_a_batch_is_shared_equally_or_not_at_all() -> None:
    assert share(16, 4) == 4
    with pytest.raises(UserError, match="cannot be divided among 3"):
        share(16, 3)


def test_a_row_survives_its_file() -> None:
    row = from_json(json.dumps([PAIR]), "x")[0]
    assert isinstance(row, DdpRow)
    from potluck.checked import to_json

    assert from_json(to_json([row]), "x") == (row,)


def test_json_beyond_what_python_reads_is_the_users_error() -> None:
    with pytest.raises(UserError, match="x is not a JSON file"):
        from_json("[" * 100_000, "x")
