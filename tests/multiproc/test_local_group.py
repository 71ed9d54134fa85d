"""Collectives through shared memory, between real processes: what they give, and how they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.processes import Processes

MEMBERS = Path(__file__).resolve().parents[1] / "support" / "local_members.py"
SHARED = Path("/dev/shm")

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no POSIX shared memory"),
    pytest.mark.timeout(150),  # on a machine that may be busy
]


def segments() -> set[str]:
    return {name for name in os.listdir(SHARED) if "potluck" in name} if SHARED.exists() else set()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_collective_gives_what_it_should(tmp_path: Path, size: int) -> None:
    before = segments()
    with Processes(tmp_path) as processes:
        members = processes.python(str(MEMBERS), "everything", str(size))
        members.succeeds(deadline_s=110)
        assert not members.stderr()
    assert segments() <= before


def test_failures_are_told_to_every_member_and_name_the_culprit(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        members = processes.python(str(MEMBERS), "failures", "3")
        members.wait(110)
        assert members.stdout().splitlines()[-1] == "statuses 0 -9 0", members.tails()


def test_one_that_dies_in_its_turn_is_named(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        members = processes.python(str(MEMBERS), "lost_in_turn", "4")
        members.wait(110)
        assert members.stdout().splitlines()[-1] == "statuses 0 -9 0 0", members.tails()


@pytest.mark.parametrize("size", [2, 4])
def test_everybody_gets_the_same_bits(tmp_path: Path, size: int) -> None:
    with Processes(tmp_path) as processes:
        processes.python(str(MEMBERS), "same_bits", str(size)).succeeds(deadline_s=110)


@pytest.mark.parametrize("size", [2, 3])
def test_threads_change_no_bit(tmp_path: Path, size: int) -> None:
    with Processes(tmp_path) as processes:
        processes.python(str(MEMBERS), "many_threads", str(size)).succeeds(deadline_s=110)


def test_a_member_that_has_done_its_part_may_end_before_the_others(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.python(str(MEMBERS), "last_words", "4").succeeds(deadline_s=90)


def test_killing_everybody_leaves_nothing_behind(tmp_path: Path) -> None:
    before = segments()
    with Processes(tmp_path) as processes:
        members = processes.python(str(MEMBERS), "killed", "3")
        members.wait_for_text("going", deadline_s=90)
        members.kill()
    assert segments() <= before
