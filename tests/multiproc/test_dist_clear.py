"""Two ranks in the clear: large tensors by a bare connection, with the results and the ends that mail has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks

CASES = "support.dist_streams:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def test_sums_are_exact_and_go_by_the_connection(ranks: Ranks) -> None:
    assert ranks.call(f"{CASES}sums", 2, {}) == [True, True]


def test_with_checksums_everything_goes_by_mail(ranks: Ranks) -> None:
    assert ranks.call(f"{CASES}sums", 2, {"checksum": True}) == [False, False]


def test_where_no_connection_can_be_made_everything_goes_by_mail(ranks: Ranks) -> None:
    assert ranks.call(f"{CASES}behind_a_firewall", 2) == [False, False]


def test_packed_sums_have_the_same_bits_on_both(ranks: Ranks) -> None:
    one, two = ranks.call(f"{CASES}packed", 2)
    assert one == two


def test_a_rank_that_dies_in_the_midst_is_named_in_seconds() -> None:
    with Ranks(2) as mortals:
        (error, text, seconds), _ = mortals.call(f"{CASES}killed", 2, may_die=[1])
    assert error == "RankGoneError"
    assert "rank 1" in text
    assert seconds < 10


def test_a_rank_that_stops_in_the_midst_is_named_when_time_is_up(ranks: Ranks) -> None:
    (error, text, seconds), _ = ranks.call(f"{CASES}stuck", 2, 1.5)
    assert error == "CollectiveTimeoutError"
    assert "all_reduce" in text
    assert seconds < 10


def test_ranks_that_disagree_are_shown_both_sides(ranks: Ranks) -> None:
    for error, text, _ in ranks.call(f"{CASES}mismatch", 2):
        assert error == "CollectiveError"
        assert "1048653" in text
        assert "1048654" in text
