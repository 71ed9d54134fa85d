"""The wheel is complete without the checkout: installed by itself, it trains with a guest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def output(*command: str | Path, cwd: Path) -> str:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("POTLUCK_", "PYTHON", "COVERAGE"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=plain, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(150)
def test_the_wheel_trains_in_a_venv_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="builds a wheel")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "build_backend.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    built = output(sys.executable, "-c", "import build_backend as b; print(b.build_wheel('.'))", cwd=tree)
    wheel = tree / built.split()[-1]

    venv.create(tmp_path / "venv", with_pip=False, symlinks=os.name != "nt")
    own = Path(output(python_of(tmp_path / "venv"), "-c", PURELIB, cwd=tmp_path).strip())
    # What Potluck needs is lent by this environment: a bare path, whose own .pth files (and with them an editable
    # potluck) are not read.
    (own / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installed = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", own, wheel]
    output(*installed, cwd=tmp_path)
    shutil.rmtree(tree)

    python = python_of(tmp_path / "venv")
    found = output(python, "-c", "import potluck; print(potluck.__file__)", cwd=tmp_path).strip()
    assert Path(found).is_relative_to(own)
    assert "a token that cannot be used" in output(python, "-m", "potluck", "explain", "bad-token", cwd=tmp_path)
    assert "home-pair" in output(python, "-m", "potluck", "lab", "list", cwd=tmp_path)
    small = ["--depth", "1", "--sequence", "32", "--batch-tokens", "256", "--steps", "4", "--guests", "1", "--web"]
    output(python, "-m", "potluck", "train", *small, "--view", "plain", "--runs", tmp_path / "runs", cwd=tmp_path)
    assert list((tmp_path / "runs").glob("*/checkpoints/step-*"))
    page = ["report", "--html", tmp_path / "run.html"]
    output(python, "-m", "potluck", *page, cwd=tmp_path)
    assert "EventSource" in (tmp_path / "run.html").read_text(encoding="utf-8")  # its script is in the wheel


PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def python_of(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
