"""`potluck explain`: every error's page is in the installed package, and is found by its code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from potluck import errors
from potluck.cli._app import run

ROOT = Path(__file__).resolve().parents[2]
CODES = {c.code for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.PotluckError)}


@pytest.mark.parametrize("code", [*sorted(CODES), "doctor"])
def test_a_page_is_shown_without_links_that_lead_nowhere(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", code]) == 0
    shown, said = capsys.readouterr()
    assert shown.startswith(f"# {code}: ")
    assert ".md)" not in shown
    assert said == ""


def test_a_link_to_another_page_becomes_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    run(["explain", "bad-token"])
    assert "answers with refused (`potluck explain refused`)" in capsys.readouterr().out


def test_alone_it_lists_every_code_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == CODES | {"doctor"}
    assert lines["bad-token"] == "a token that cannot be used"


def test_an_unknown_code_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "bad-tokn"]) == 2
    said = capsys.readouterr().err
    assert "there is no page 'bad-tokn'" in said
    assert "bad-token" in said
    assert "see: potluck explain bad-input" in said


def test_what_an_error_says_to_type_works(capsys: pytest.CaptureFixture[str]) -> None:
    run(["report", "no-such-run"])
    command = capsys.readouterr().err.splitlines()[-1].removeprefix("see: potluck ")
    assert run(command.split()) == 0
    assert capsys.readouterr().out.startswith("# bad-run-folder")


def test_on_a_terminal_it_is_rendered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["explain", "port-taken"]) == 0
    shown = capsys.readouterr().out
    assert "port-taken" in shown
    assert "**" not in shown


@pytest.mark.slow
def test_a_built_wheel_holds_the_pages(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    if "No module named 'setuptools'" in built.stderr:
        pytest.skip("no setuptools here to build a wheel with")
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
    assert {f"potluck/troubleshooting/{code}.md" for code in CODES} <= names
