"""Groups that end right after a message: the message arrives, and nobody waits for the dead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.fleet.ranks import rank_environment
from support.dist_endings import LARGE
from support.processes import Processes
from support.ranks import SOURCE, Ranks, free_port

ENDINGS = "support.dist_endings:"
SUPPORT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("count", "turns"), [(3, 20), (LARGE, 20)])
def test_what_was_sent_right_before_the_end_arrives(
    ranks: Ranks, tmp_path: Path, transport: str, count: int, turns: int
) -> None:
    store = {"STORE": str(tmp_path / "store")}
    wrong = ranks.call(f"{ENDINGS}send_and_end", 2, transport, count, turns, "send", deadline_s=100, env=store)
    assert wrong == [[], []]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["isend", "broadcast"])
def test_what_nobody_waited_for_arrives_as_well(ranks: Ranks, tmp_path: Path, transport: str, how: str) -> None:
    store = {"STORE": str(tmp_path / "store")}
    wrong = ranks.call(f"{ENDINGS}send_and_end", 3, transport, LARGE // 8, 4, how, deadline_s=60, env=store)
    assert wrong == [[], [], []]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_group_can_be_made_after_another_with_the_same_store(
    ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    found = ranks.call(f"{ENDINGS}once_more", 3, transport, deadline_s=60, env={"STORE": str(tmp_path / "store")})
    assert found == [
        [3.0, 1.0, 1.0, 6.0, 9.0, 6.0, 6.0],
        [3.0, 1.0, 1.0, 6.0, 5.0, 5.0, 9.0],
        [3.0, 6.0, 5.0, 5.0, 9.0, 6.0, 6.0],
    ]


def test_torchrun_starts_a_group_anew_after_a_rank_has_died(tmp_path: Path) -> None:
    """With the store of the first try, in which the ranks of the first try are."""
    words = ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "support.dist_endings"]
    results = tmp_path / "results"
    results.mkdir()
    with Processes(tmp_path) as processes:
        env = {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(SUPPORT)))}
        run = processes.torchrun(*words, "restarted", str(results), env=env, children=4)
        run.succeeds(deadline_s=100)
    assert {path.name: path.read_text() for path in results.iterdir()} == {"0": "try 1: 2.0", "1": "try 1: 2.0"}


@pytest.mark.parametrize(("transport", "count", "how"), [("tcp", LARGE, "script"), ("shm", 3, "forked")])
def test_a_process_that_just_ends_has_delivered(tmp_path: Path, transport: str, count: int, how: str) -> None:
    port = free_port()
    words = ("-m", "support.dist_endings", transport, str(count), how)
    path = {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(SUPPORT)))}
    with Processes(tmp_path) as processes:
        scripts = [
            processes.python(*words, env={**rank_environment(rank, 2, "127.0.0.1", port), **path})
            for rank in range(2)
        ]
        for script in scripts:
            script.succeeds(deadline_s=50)


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_who_is_dead_or_reads_nothing_does_not_hold_up_the_end(how: str) -> None:
    with Ranks(3) as mortals:
        told = mortals.call(f"{ENDINGS}end_beside", 3, "tcp", how, may_die=[2])
    for error, text, seconds in told[:2]:
        assert not error, text
        assert seconds < 8
