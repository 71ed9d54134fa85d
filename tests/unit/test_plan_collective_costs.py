"""The closed forms against values worked out by hand, and against each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigError
from potluck.plan import collective_costs as c

GBIT = 1e9 / 8


@pytest.mark.parametrize(
    ("line_bytes_per_s", "seconds"), [(1 * GBIT, 14.3), (10 * GBIT, 1.43), (400 * GBIT, 0.036)]
)
def test_760_m_parameters_in_bf16_on_two_ranks_at_85_percent_of_the_line(
    line_bytes_per_s: float, seconds: float
) -> None:
    found = c.ring_all_reduce_s(760e6 * 2, 2, 0.85 * line_bytes_per_s)
    assert found == pytest.approx(seconds, rel=0.01)


def test_gpt2_in_fp32_over_1_gbe() -> None:
    assert c.ring_all_reduce_s(124e6 * 4, 2, 117e6) == pytest.approx(4.2, abs=0.05)


def test_worked_by_hand() -> None:
    # 4 ranks, 400 bytes, 100 bytes/s: three rounds of 100 bytes each way.
    assert c.reduce_scatter_s(400, 4, 100) == 3.0
    assert c.all_gather_s(400, 4, 100, 0.5) == 4.5
    assert c.ring_all_reduce_s(400, 4, 100, 0.5) == 9.0


@pytest.mark.parametrize("form", [c.reduce_scatter_s, c.all_gather_s, c.ring_all_reduce_s])
def test_one_rank_or_nothing_to_send_takes_no_time(form: object) -> None:
    assert callable(form)
    assert form(1e9, 1, 1e6, 0.1) == 0.0
    assert form(0, 8, 1e6, 0.1) == 0.0
    assert form(1e9, 8, math.inf, 0.0) == 0.0


@given(size=st.floats(1, 1e12), ranks=st.integers(2, 1024), rate=st.floats(1e3, 1e11), latency=st.floats(0, 0.1))
def test_an_all_reduce_is_a_scatter_and_a_gather_and_never_beats_the_line(
    size: float, ranks: int, rate: float, latency: float
) -> None:
    both = c.reduce_scatter_s(size, ranks, rate, latency) + c.all_gather_s(size, ranks, rate, latency)
    assert c.ring_all_reduce_s(size, ranks, rate, latency) == pytest.approx(both)
    assert size / rate * (1 - 1e-9) <= both
    assert both <= 2 * size / rate + 2 * (ranks - 1) * latency + 1e-9


def test_overlap_hides_what_the_last_backwards_allow() -> None:
    # One piece: all of it after the last end.
    assert c.overlapped_end_s([10, 4], [6, 2], 3, 1) == 13
    # Ten pieces: the first is there when both have it (10 − 6·0.9), and the wire is done before the computing is.
    assert c.overlapped_end_s([10, 4], [6, 2], 3, 10) == pytest.approx(10.3)
    # A short last backward on the late machine hides little, however long the other's is.
    assert c.overlapped_end_s([10, 10], [9, 1], 3, 10) == pytest.approx(10 - 0.9 + 3)


@given(
    ranks=st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1)), min_size=1, max_size=8),
    exchange=st.floats(0, 100),
    pieces=st.integers(1, 50),
)
def test_overlap_ends_between_the_best_and_no_overlap(
    ranks: list[tuple[float, float]], exchange: float, pieces: int
) -> None:
    ends = [end for end, _ in ranks]
    end = c.overlapped_end_s(ends, [part * e for e, part in ranks], exchange, pieces)
    assert max(ends) <= end <= max(ends) + exchange + 1e-9


def test_a_shared_link_is_divided_unless_the_own_one_is_slower() -> None:
    assert c.shared_nic_bytes_per_s(100, 120, 3) == 40
    assert c.shared_nic_bytes_per_s(30, 120, 3) == 30
    assert c.slowest_link([]) == math.inf


@pytest.mark.parametrize("wrong", [(-1, 2, 1.0, 0.0), (1, 0, 1.0, 0.0), (1, 2, 0.0, 0.0), (1, 2, 1.0, math.nan)])
def test_nonsense_is_an_error(wrong: tuple[float, int, float, float]) -> None:
    with pytest.raises(ConfigError):
        c.ring_all_reduce_s(*wrong)


class TestTwoLevels:
    def test_worked_by_hand(self) -> None:
        # 2 nodes of 4, 400 bytes: inside 3 rounds of 100 bytes at 100/s, twice; between 2 rounds of 200 at 50/s.
        assert c.two_level_all_reduce_s(400, [(4, 100, 0.0)] * 2, 50) == 2 * 3.0 + 8.0
        assert c.two_level_all_reduce_s(400, [(4, 100, 0.5)] * 2, 50, 1.0) == 2 * 4.5 + 10.0

    @given(st.floats(1, 1e12), st.integers(1, 64), st.floats(1, 1e12), st.floats(0, 1))
    def test_one_device_a_node_is_the_plain_ring(self, size: float, nodes: int, rate: float, wait_s: float) -> None:
        found = c.two_level_all_reduce_s(size, [(1, math.inf, 0.0)] * nodes, rate, wait_s)
        assert found == c.ring_all_reduce_s(size, nodes, rate, wait_s)

    def test_one_node_uses_no_link_and_the_slowest_node_sets_the_time(self) -> None:
        assert c.two_level_all_reduce_s(400, [(4, 100, 0.0)], 1e-9) == c.ring_all_reduce_s(400, 4, 100)
        slow = c.two_level_all_reduce_s(400, [(4, 100, 0.0), (4, 10, 0.0)], 50)
        assert slow == 2 * 30.0 + 8.0
