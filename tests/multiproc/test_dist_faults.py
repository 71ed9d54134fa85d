"""Ranks that disagree, never come, die, freeze or are aborted: an error that names them, and never a hang."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from support import fake_device
from support.ranks import Ranks

MOST = 3
FAULTS = "support.dist_faults:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(MOST)
    yield pool
    pool.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("dtype", ["float32", "float64"]),
        ("shape", ["[6]", "[7]"]),
        ("op", ["SUM", "MAX"]),
        ("collective", ["all_reduce", "barrier"]),
    ],
)
def test_ranks_that_disagree_are_all_shown_both_sides(
    ranks: Ranks, transport: str, kind: str, sides: list[str]
) -> None:
    for first, second in ranks.call(f"{FAULTS}mismatch", 3, transport, kind):
        error, text, seconds = first
        assert error == "CollectiveError"
        assert all(side in text for side in sides), text
        assert seconds < 10
        assert second[0] == "CollectiveError"


def test_a_rank_that_is_through_already_hears_of_the_disagreement_at_a_later_call(ranks: Ranks) -> None:
    for _, second in ranks.call(f"{FAULTS}mismatch", 3, "tcp", "root"):
        assert second[0] == "CollectiveError"
        assert "root 0" in second[1]
        assert "root 1" in second[1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_never_comes_is_named(ranks: Ranks, transport: str) -> None:
    *waiting, _ = ranks.call(f"{FAULTS}absent", 3, transport, 1.5)
    texts = [text for _, text, _ in waiting]
    assert all(seconds < 8 for *_, seconds in waiting)
    assert {error for error, *_ in waiting} <= {"CollectiveTimeoutError", "CollectiveError", "RankGoneError"}
    assert all("rank 2" in text and "all_reduce" in text for text in texts), texts


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dead_rank_is_noticed_in_seconds(ranks: Ranks, transport: str) -> None:
    with Ranks(3) as mortals:
        *waiting, _ = mortals.call(f"{FAULTS}killed", 3, transport, "killed", may_die=[2])
    for error, text, seconds in waiting:
        assert error in ("RankGoneError", "CollectiveError")
        assert "rank 2" in text
        assert seconds < 10


def test_a_frozen_rank_is_noticed_in_seconds(ranks: Ranks) -> None:
    with Ranks(3) as mortals:
        *waiting, _ = mortals.call(f"{FAULTS}killed", 3, "tcp", "frozen", may_die=[2])
    for error, text, seconds in waiting:
        assert error in ("RankGoneError", "CollectiveError")
        assert "rank 2" in text
        assert seconds < 10


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_abort_ends_what_is_under_way_on_every_rank(ranks: Ranks, transport: str) -> None:
    for error, text, seconds in ranks.call(f"{FAULTS}aborted", 3, transport):
        assert error
        assert "abort" in text
        assert seconds < 10


def test_a_monitored_barrier_names_who_is_missing(ranks: Ranks) -> None:
    first, *_ = ranks.call(f"{FAULTS}monitored", 3)
    assert first[0] == "CollectiveTimeoutError"
    assert "rank 2" in first[1]


def test_messages_that_do_not_fit_or_never_come(ranks: Ranks) -> None:
    _, (unfit, other, late) = ranks.call(f"{FAULTS}messages", 2)
    assert unfit[0] == other[0] == "CollectiveError"
    assert "(5,)" in unfit[1]
    assert "(3,)" in unfit[1]
    assert "float32" in other[1]
    assert "int32" in other[1]
    assert late[0] == "CollectiveTimeoutError"
    assert "rank 0" in late[1]
    assert "tag 9" in late[1]


def test_ranks_with_different_settings_are_told_which(ranks: Ranks) -> None:
    for error, text, _ in ranks.call(f"{FAULTS}disagreeing", 2):
        assert error == "CollectiveError"
        assert "chunk_bytes" in text


def test_waiting_for_less_long_than_the_collective_may_take(ranks: Ranks) -> None:
    first, _ = ranks.call(f"{FAULTS}bounded_wait", 2)
    assert first[0] == "CollectiveTimeoutError"
    assert first[2] < 1.4


def test_strangers_are_not_let_in(ranks: Ranks) -> None:
    _, seen = ranks.call(f"{FAULTS}stranger", 2, "tcp")
    assert seen == int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


@pytest.mark.parametrize(("transport", "device"), [("shm", "cpu"), ("tcp", "cpu"), ("tcp", "fake")])
def test_a_rank_that_dies_is_named_in_the_backward_pass_of_ddp(ranks: Ranks, transport: str, device: str) -> None:
    """On a device without streams, too, which torch's futures want for their callbacks."""
    if device == "fake" and not fake_device.available():
        pytest.skip("this machine has a real accelerator")
    with Ranks(2) as mortals:
        (error, text, seconds), _ = mortals.call(f"{FAULTS}in_the_backward_pass", 2, transport, device, may_die=[1])
    # In the midst of it from torch's C++, which has the text alone; from ours where the call comes after the death.
    assert error in ("RuntimeError", "RankGoneError")
    assert "all_reduce #" in text
    assert "rank 1" in text
    if error == "RuntimeError":
        assert "RankGoneError" in text
        assert "hint: " in text
    assert seconds < 15


def test_ranks_that_are_not_there_are_refused_and_the_group_goes_on(ranks: Ranks) -> None:
    for told in ranks.call(f"{FAULTS}of_no_rank", 2):
        for error, text, _ in told[:3]:
            assert error == "CollectiveError"
            assert "there is no rank 9 in this group" in text
        assert told[3][0] == "", told[3]
