"""The campaign's rows, its runner and its table: every row has a script and a short test, pieces are added up."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STRESS = ROOT / "bench" / "stress"


@pytest.fixture(name="rows")
def _rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(STRESS))
    return importlib.import_module("_rows")


@pytest.fixture(name="table")
def _table(rows: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("table")


def piece(row: str, times: float, bad: int = 0, **more: Any) -> dict[str, Any]:
    return {"row": row, "times": times, "bad": bad, "seconds": 60.0, "seed": 1, "date": "2026-11-15", **more}


def test_every_row_has_its_script_and_its_short_version(rows: ModuleType) -> None:
    assert [row.name for row in rows.ROWS] == [f"R{n}" for n in range(1, 13)] + [f"S{n}" for n in range(1, 7)]
    assert sorted(row.script for row in rows.ROWS) == sorted(path.name for path in STRESS.glob("[rs][0-9]*_*.py"))
    for row in rows.ROWS:
        assert row.short, row.name
        for short in row.short:
            file, _, name = short.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / "faults" / file).read_text(), re.M), short


def test_pieces_are_added_up_and_nothing_else(table: ModuleType) -> None:
    text = table.table([piece("R1", 40, seed=1), piece("R1", 70, 1, seed=2, date="2026-11-16"), piece("R9", 8)])
    (r1,) = [line for line in text.splitlines() if line.startswith("| R1 ")]
    assert "| 200 | 110 in 2 pieces | 1 | 2026-11-15 to 2026-11-16 |" in r1
    (r9,) = [line for line in text.splitlines() if line.startswith("| R9 ")]
    assert "| 20 min | 1 min | 0 |" in r9
    assert "| 100 | pending | pending | pending |" in next(x for x in text.splitlines() if x.startswith("| R2 "))


def test_a_piece_in_two_files_counts_once(table: ModuleType, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.jsonl"
    one.write_text(json.dumps({"results": [piece("R5", 300)]}))
    two.write_text("words\n" + json.dumps(piece("R5", 300)) + "\n" + json.dumps(piece("R5", 9, seed=7)) + "\n")
    pieces = table.distinct([*table.read(one), *table.read(two)])
    assert "| 309 in 2 pieces | 0 |" in table.table(pieces)


def test_minutes_that_nobody_measured_are_not_counted(table: ModuleType) -> None:
    with pytest.raises(ValueError, match="how many minutes"):
        table.table([piece("S3", 500)])
    assert "| 5 min | 2 min | 0 |" in table.table([piece("S3", 500, seconds=300.0, minutes=2.0)])


def test_the_table_goes_between_the_marks_and_only_there(table: ModuleType, tmp_path: Path) -> None:
    document = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert table.written(table.written(document, "x"), "y") == table.written(document, "y")
    file = tmp_path / "doc.md"
    file.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    results = tmp_path / "r.json"
    results.write_text(json.dumps(piece("S4", 1)))
    assert table.main([str(results), "--write", str(file)]) == 0
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    file.write_text("no marks")
    assert table.main([str(results), "--write", str(file)]) == 1


def test_the_runner_says_what_it_does_not_know_and_what_it_does_not_manage() -> None:
    unknown = run("--only", "R99")
    assert unknown.returncode == 2
    assert "there is no row 'R99'; rows: R1, R2" in unknown.stderr
    hurried = run("--only", "R1,S4", "--minutes", "0.001")
    assert hurried.returncode == 0
    assert "not run, for lack of time: R1, S4" in hurried.stdout
    assert "Bounded" in run("--help", MAKELEVEL="1", PYTHONIOENCODING="ascii").stdout


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, str(STRESS), *words], {**os.environ, **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
