"""The folder of a guest's script: removed in any case, if need be by a later guest."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from potluck.fleet import guest_folder as module
from potluck.fleet.guest_folder import guest_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks of folders")

HOLDS = """
import time
from potluck.fleet.guest_folder import guest_folder
with guest_folder() as folder:
    (folder / "job.py").write_text("")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(temporary: Path) -> list[Path]:
    with guest_folder() as own:
        assert own.is_dir()
        found = [path for path in temporary.iterdir() if path != own]
    assert not own.exists()
    return found


def test_the_folder_of_a_killed_guest_is_removed_by_the_next_one(temporary: Path) -> None:
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE) as guest:
        try:
            assert guest.stdout is not None
            folder = Path(guest.stdout.readline().decode().strip())
            assert left(temporary) == [folder], "its process is alive"
        finally:
            guest.kill()
            guest.wait(20)
    assert (folder / "job.py").exists()
    assert left(temporary) == []


def test_only_folders_of_the_same_user_and_machine_are_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guest_folder() as own:
        same = own.name.rpartition("-")[0]
    elsewhere, file, link = (
        temporary / "potluck-guest-elsewhere-1",
        temporary / f"{same}-2",
        temporary / f"{same}-3",
    )
    elsewhere.mkdir()
    file.write_text("")
    (temporary / "other").mkdir()
    link.symlink_to(temporary / "other")
    others = sorted([elsewhere, file, link, temporary / "other"])
    assert sorted(left(temporary)) == others
    (temporary / f"{same}-4").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert sorted(left(temporary)) == sorted([*others, temporary / f"{same}-4"])
    assert sorted(left(temporary)) == others


def test_where_nothing_can_be_locked_nothing_is_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(module, "_lock", fails)
    with guest_folder() as first:
        assert left(temporary) == [first]
        assert first.is_dir()
