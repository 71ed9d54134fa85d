"""What `make` installs and when, that `make test` fails when anything fails, and what CI runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from support import pins

ROOT = Path(__file__).resolve().parents[2]


def script(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make` with this project's rules, in a folder that has its files and nothing of its own to run."""
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
        os.utime(folder / name, (1, 1))
    command = ["make", "-f", str(ROOT / "Makefile"), *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=30)


@needs_make
@pytest.mark.parametrize(
    ("goal", "there", "installed"),
    [
        ("train", (), ["plots"]),
        ("train", (".made-for",), []),
        ("test", (), ["plots", "plots,dev"]),
        ("test", (".made-for",), ["plots,dev"]),
        ("test", (".made-for", ".made-for-tests"), []),
        ("test", (".made-for-tests", ".made-for"), ["plots,dev"]),  # training's is newer: the pins have changed
        ("bench", (".made-for",), ["plots,dev"]),
    ],
)
def test_training_installs_no_tools_and_tests_add_them(
    goal: str, there: tuple[str, ...], installed: list[str], tmp_path: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    for number, name in enumerate(there):
        (tmp_path / ".venv" / name).touch()
        os.utime(tmp_path / ".venv" / name, (10 + number, 10 + number))
    done = make(tmp_path, "-n", goal, "SOUND=yes")
    assert done.returncode == 0, done.stderr
    assert re.findall(r'-c constraints.txt --no-build-isolation -e "\.\[(.*)\]"', done.stdout) == installed


@needs_make
@pytest.mark.parametrize(
    ("ruff", "mypy", "tests", "said"),
    [
        (0, 0, 0, ""),
        (1, 0, 0, ""),
        (0, 1, 0, "mypy found"),
        (0, 0, 1, ""),
        (0, 1, 1, "mypy found"),
        (0, 0, 5, "chose no test"),
    ],
)
def test_any_part_that_fails_fails_make_test(ruff: int, mypy: int, tests: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ruff", f"#!/bin/sh\nexit {ruff}\n")
    script(tmp_path / "bin" / "mypy", f"#!/bin/sh\nsleep 0.1\nexit {mypy}\n")
    script(tmp_path / "bin" / "python", f'#!/bin/sh\ncase "$*" in *" pytest "*) exit {tests};; esac\n')
    for name in ("stamp", "tools"):
        (tmp_path / name).touch()
    done = make(tmp_path, "test", "BIN=bin", "STAMP=stamp", "TOOLS=tools", "SOUND=yes")
    assert (done.returncode == 0) == (ruff == mypy == tests == 0), done.stdout + done.stderr
    assert said in done.stderr


@pytest.mark.skipif(os.name != "posix" or shutil.which("bash") is None, reason="a script of bash")
@pytest.mark.parametrize(
    ("user", "packages", "goals"),
    [(0, 0, ["system-packages", "test"]), (0, 1, ["system-packages", "test"]), (1000, 0, ["test"])],
)
def test_ci_is_make_test_whether_packages_can_be_had_or_not(
    user: int, packages: int, goals: list[str], tmp_path: Path
) -> None:
    called = tmp_path / "called"
    fakes = {
        "id": f"echo {user}",
        "apt-get": "exit 100",
        "make": f'echo "$*" >> "{called}"; [ "$*" = test ] || exit {packages}',
    }
    for name, text in fakes.items():
        script(tmp_path / name, f"#!/bin/sh\n{text}\n")
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(ROOT / ".ci" / "run")], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, called.read_text().split("\n")) == (0, [*goals, ""])
    assert ("no system packages" in done.stdout) == (packages != 0)


def test_pins_are_versions_without_builds_and_without_what_torch_pins_itself() -> None:
    frozen = """\
# Editable Git install with no remote (potluck==0.1.0)
-e /home/me/potluck
MarkupSafe==3.0.4
jinja2==3.1.6
nvidia-nccl-cu13==2.28
pip==25.3
setuptools==80.1
torch==2.13.0+cpu
triton==3.6
"""
    assert pins.pins(frozen) == ["jinja2==3.1.6", "MarkupSafe==3.0.4", "setuptools==80.1", "torch==2.13.0"]


def test_everything_that_is_installed_by_name_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = list(project["project"]["dependencies"])
    (extras,) = re.findall(r"^TESTING +:= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for extra in extras.split(","):
        # A marker may leave it out where the pins were made.
        wanted += [line for line in project["project"]["optional-dependencies"][extra] if ";" not in line]
    pinned = [line.partition("==")[0] for line in pins.FILE.read_text(encoding="utf-8").splitlines()]
    assert {_plain(line) for line in wanted} <= {_plain(name) for name in pinned}, "make pins"
    assert pins.kept(pins.FILE.read_text(encoding="utf-8"))


def _plain(requirement: str) -> str:
    """The name in the one form that PEP 503 gives to all its spellings."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
