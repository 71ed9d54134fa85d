"""A batch divided by hand: equally, and by the machines' true speeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.balance.shares import equal_shares, whole_shares
from potluck.errors import ConfigError


def balanced(batch: int, seconds: Sequence[float]) -> list[int]:
    return whole_shares(batch, seconds, least=1)


def test_equal_shares_differ_by_one_at_most() -> None:
    assert equal_shares(48, 2) == [24, 24]
    assert equal_shares(10, 4) == [3, 3, 2, 2]
    assert equal_shares(3, 3) == [1, 1, 1]


def test_balanced_shares_follow_the_speeds() -> None:
    assert balanced(48, [0.15, 0.6]) == [39, 9]  # 38 and 10 would take 6.0 s, these take 5.85
    assert balanced(45, [0.1, 0.8]) == [40, 5]
    assert balanced(150, [0.1, 0.2, 0.4, 0.8]) == [80, 40, 20, 10]
    assert balanced(7, [0.3]) == [7]


def test_the_slowest_machine_still_gets_a_sample() -> None:
    assert balanced(20, [0.1, 5.0]) == [19, 1]
    assert balanced(3, [1.0, 1e6, 1e6]) == [1, 1, 1]


speeds = st.floats(min_value=0.01, max_value=100.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=4, max_value=14), st.lists(speeds, min_size=1, max_size=4))
def test_no_other_shares_end_sooner(batch: int, seconds: list[float]) -> None:
    def slowest_s(shares: tuple[int, ...] | list[int]) -> float:
        return max(n * s for n, s in zip(shares, seconds))

    shares = balanced(batch, seconds)
    assert sum(shares) == batch
    assert min(shares) >= 1
    others = itertools.product(range(1, batch + 1), repeat=len(seconds))
    best = min(slowest_s(other) for other in others if sum(other) == batch)
    assert slowest_s(shares) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.integers(min_value=8, max_value=2000), st.lists(speeds, min_size=1, max_size=8))
def test_shares_are_proportional_but_for_whole_samples(batch: int, seconds: list[float]) -> None:
    total = sum(1 / s for s in seconds)
    for share, s in zip(balanced(batch, seconds), seconds):
        assert abs(share - batch / s / total) <= len(seconds)


@pytest.mark.parametrize(("batch", "machines"), [(1, 2), (0, 1), (5, 0)])
def test_too_few_samples_or_machines_are_an_error(batch: int, machines: int) -> None:
    with pytest.raises(ConfigError):
        equal_shares(batch, machines)
    with pytest.raises(ConfigError):
        balanced(batch, [0.1] * machines)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_must_be_a_speed(seconds: float) -> None:
    with pytest.raises(ConfigError, match="s/sample"):
        balanced(10, [0.1, seconds])
