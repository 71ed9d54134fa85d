"""`potluck lab`: its help, the list of rigs, and the picture of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from potluck.cli import _app, lab
from potluck.lab import rigs
from potluck.lab.comparison import BenchOutcome
from potluck.spec.rig import parse
from support import lab_outcomes
from support.rigs import to_toml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_help_lists_the_verbs_in_order_and_imports_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lab.VERBS, "broken", _app.Verb("no_such_module:x", "Cannot be imported."))
    assert _app.run(["lab", "--help"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n  {name} ") for name in ("list", "show", "bench", "shell", "exec", "broken")]
    assert places == sorted(places)
    assert "potluck lab bench home-pair" in out


def test_help_imports_nothing_heavy() -> None:
    assert imported_by("lab", "--help") & {"torch", "numpy", "zmq", "rich", "matplotlib"} == set()


def test_show_imports_no_torch() -> None:
    assert imported_by("lab", "show", "twins") & {"torch", "numpy", "zmq", "matplotlib"} == set()


def imported_by(*arguments: str) -> set[str]:
    code = f"import sys; from potluck.cli._app import run; run({list(arguments)}); print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_every_verb_that_is_offered_is_a_command() -> None:
    """Their files come from several hands."""
    import click

    group = lab.lab
    for name in lab.VERBS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert command.name == name


def test_a_misspelt_verb_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["lab", "bensh"]) == 2
    assert "Did you mean 'bench'?" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["lab", "list"]) == 0
    out = capsys.readouterr().out
    names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert names == ["rig", *rigs.NAMES]
    assert "1.125×" in out


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["lab", "list", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [rig["name"] for rig in table] == list(rigs.NAMES)
    assert table[0]["ideal_speedup"] == pytest.approx(1.25)


@pytest.mark.parametrize("name", rigs.NAMES)
def test_show(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["lab", "show", name]) == 0
    out = capsys.readouterr().out
    for machine in rigs.load(name).machines:
        assert machine.name in out
    assert "ideal speed-up" in out


@pytest.mark.parametrize("name", rigs.NAMES)
def test_show_as_toml_is_a_rig_file_again(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _app.run(["lab", "show", name, "--toml"]) == 0
    path = tmp_path / "mine.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert rigs.load(str(path)) == rigs.load(name)
    assert "#" in path.read_text(encoding="utf-8")


def test_show_as_toml_where_there_is_only_ascii(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "potluck", "lab", "show", "home-pair", "--toml"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert parse(tomllib.loads(done.stdout.decode("ascii"))) == rigs.load("home-pair")


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["lab", "show", "home-pair", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert parse(table["rig"]) == rigs.load("home-pair")
    assert table["ideal_speedup"] == pytest.approx(1.25)
    assert table["rounding_cost"] == pytest.approx(0.0154, abs=0.0001)
    assert table["machines"][1]["gradient_ratio"] == pytest.approx(0.369, abs=0.001)


def test_show_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(rigs.load("wifi")).replace('"sofa"', '"kitchen"'))
    assert _app.run(["lab", "show", str(path)]) == 0
    assert "kitchen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "home-pear"], "did you mean home-pair"),
        (["show", "nowhere.toml"], "nowhere.toml"),
        (["show", "broken.toml"], "link_mbit"),
        (["show", "home-pair", "--toml", "--json"], "cannot be combined"),
        (["show"], "RIG"),
    ],
)
def test_mistakes(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text('name="x"\n[[machine]]\nname="a"\nrole="host"\nlink_mbits=3\n')
    assert _app.run(["lab", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_a_bench_as_a_page_and_as_rows_to_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is measured is made up; the files and what is printed are real."""
    found, outcomes = lab_outcomes.all_of(rigs.load("home-pair"))
    measured = BenchOutcome(results=found, outcomes=tuple(outcomes), failed={})
    monkeypatch.setattr("potluck.lab.comparison.bench", lambda *given: measured)
    monkeypatch.setattr("potluck.lab.comparison.put_up", lambda *given, **more: nullcontext())
    page = tmp_path / "page.html"
    out = str(tmp_path / "out")
    words = ["lab", "bench", "home-pair", "--out", out, "--no-plots", "--html", str(page), "--row"]
    assert _app.run(words) == 0
    assert "home-pair: strategies side by side" in page.read_text(encoding="utf-8")
    assert "| potluck: laptop at 0.25 of its speed |" in capsys.readouterr().out
    assert _app.run([*words[:-3], "--html", str(tmp_path / "no" / "page.html")]) == 2
    monkeypatch.setenv("POTLUCK_RUNS", str(tmp_path / "elsewhere"))
    assert _app.run(["lab", "bench", "home-pair", "--no-plots"]) == 0
    assert [path.parent.name for path in tmp_path.glob("elsewhere/lab/home-pair-*/results.json")]
