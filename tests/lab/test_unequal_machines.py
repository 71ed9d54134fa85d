"""One run over machines that have nothing in common: user, port, login shell, interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sshd
from support.fleet import JOB
from support.processes import Processes

PYTHON = shutil.which(f"python3.{sys.version_info[1]}", path="/usr/bin:/usr/local/bin")
PACKAGES = Path(sysconfig.get_path("purelib"))


def _why_not() -> str | None:
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("useradd") is None:
        return "needs root, to make users"
    if PYTHON is None:
        return "needs a Python of this version that every user can run"
    if any(path.exists() and not path.stat().st_mode & 0o005 for path in (PACKAGES, *PACKAGES.parents)):
        return "other users cannot read this environment"
    return sshd.why_not()


pytestmark = [
    pytest.mark.clusters,
    pytest.mark.root,
    pytest.mark.timeout(200),
    pytest.mark.skipif(_why_not() is not None, reason=_why_not() or ""),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Readable by all. pytest's own is closed to others whenever another pytest begins."""
    with tempfile.TemporaryDirectory(prefix="potluck-unequal-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def users() -> Iterator[list[str]]:
    """Two, with two login shells, neither of them bash if there are others."""
    shells = [shell for name in ("fish", "dash", "bash", "sh") if (shell := shutil.which(name))]
    names = [f"potluck-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    try:
        for name, shell in zip(names, shells):
            # The password cannot be matched; an account without any is locked for sshd.
            subprocess.run(["useradd", "--no-create-home", "--shell", shell, "--password", "*", name], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["userdel", name], check=False)


def test_two_users_with_other_shells_and_another_python_train_together(folder: Path, users: list[str]) -> None:
    with sshd.SshMachines(folder / "ssh") as machines, Processes(folder / "up") as processes:
        for name, user in zip(("desk", "attic"), users):
            machines.add(name, user=user, env=f"PYTHONPATH={PACKAGES}")
        assert len({machine.port for machine in machines.machines}) == 2
        words = (
            "desk",
            "attic",
            "--python",
            str(PYTHON),
            "--bind",
            "127.0.0.1",
            "--threads",
            "1",
            "--wait-for",
            "2",
        )
        up = processes.potluck("up", *words, "--", str(JOB), "--steps", "10", env=machines.variables, merged=True)
        output = up.succeeds(150)
        for name, user in zip(("desk", "attic"), users):
            assert f"* {name} " in output
            (code,) = (folder / "ssh" / name / "home" / ".cache" / "potluck").glob("potluck-*")
            assert code.owner() == user
