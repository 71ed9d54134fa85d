"""Files that a flag names: checked before minutes of work, and written where the name leads."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from potluck import durable
from potluck.cli._files import check_writable, write_json
from potluck.errors import UserError

TIMES = 300


def _check_often(path: Path, together: Any, failed: Any) -> None:
    for _ in range(TIMES):
        together.wait(20)
        try:
            check_writable(path)
        except UserError:
            failed.value += 1


def test_ranks_that_check_one_file_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together, failed = context.Barrier(2), context.Value("i", 0)
    ranks = [
        context.Process(target=_check_often, args=(tmp_path / "rows.json", together, failed)) for _ in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(40)
    assert ([rank.exitcode for rank in ranks], failed.value) == ([0, 0], 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="making a link needs a privilege on Windows")
@pytest.mark.parametrize("before", ["old\n", None])
def test_a_link_stays_a_link(before: str | None, tmp_path: Path) -> None:
    """/dev/stdout is one: to replace it would break every later command of a root's machine."""
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    if before is not None:
        file.write_text(before)
    check_writable(link)
    assert link.is_symlink()
    assert (file.read_text() if file.exists() else None) == before
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert file.read_text() == '{\n "a": 1\n}\n'


def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that is mounted into a container: the folder takes no other file of its name."""

    def busy(old: Path, new: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    file = tmp_path / "rows.json"
    file.write_text("old")
    monkeypatch.setattr(durable.os, "replace", busy)
    check_writable(file)
    write_json(file, [])
    assert file.read_text() == "[]\n"
    with pytest.raises(UserError, match="cannot write"):
        write_json(tmp_path / "new.json", [])
