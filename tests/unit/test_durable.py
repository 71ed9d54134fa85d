"""Small files are replaced whole: whatever happens at whatever moment, the old text or the new is there."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from potluck import durable
from potluck.failpoints import NAMES, armed
from support.processes import Processes

MOMENTS = [name.removesuffix(".token") for name in NAMES if name.startswith("file.") and name.endswith(".token")]
NEW_AFTER = {"file.renamed", "file.after-write"}


def test_there_are_moments_to_fail_at() -> None:
    assert len(MOMENTS) == 5


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_failure_at_any_moment_leaves_the_old_or_the_new_and_nothing_else(tmp_path: Path, moment: str) -> None:
    file = tmp_path / "token"
    durable.replace(file, "old", what="token")
    with armed(f"{moment}.token=raise"), pytest.raises(OSError, match="failpoint"):
        durable.replace(file, "new", what="token")
    assert file.read_text() == ("new" if moment in NEW_AFTER else "old")
    assert os.listdir(tmp_path) == ["token"]
    durable.replace(file, "newest", what="token")
    assert file.read_text() == "newest"


KILLED = """
import sys
from pathlib import Path
from potluck import durable, failpoints
file = Path(sys.argv[1])
durable.replace(file, "old", what="token", private=True)
failpoints.arm(sys.argv[2] + ".token=kill")
durable.replace(file, "new" * 100_000, what="token", private=True)
"""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, moment: str) -> None:
    file = tmp_path / "folder" / "token"
    file.parent.mkdir()
    with Processes(tmp_path) as processes:
        killed = processes.python("-c", KILLED, str(file), moment)
        assert killed.wait(20) == -signal.SIGKILL
    assert file.read_text() == ("new" * 100_000 if moment in NEW_AFTER else "old")
    # What it left beside it is as private, and gone with the next time.
    assert {stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()} == {0o600}
    durable.replace(file, "newest", what="token", private=True)
    assert os.listdir(file.parent) == ["token"]
    assert file.read_text() == "newest"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_a_private_file_is_private_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(stat.S_IMODE(os.stat(a).st_mode)), replace(a, b)))
    file = tmp_path / "token"
    file.write_text("old")
    file.chmod(0o644)
    before = os.umask(0)
    try:
        durable.replace(file, "secret", what="token", private=True)
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_that_somebody_laid_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / ".token.new").symlink_to(elsewhere)
    durable.replace(tmp_path / "token", "secret", what="token", private=True)
    assert elsewhere.read_text() == "mine"
    assert (tmp_path / "token").read_text() == "secret"
