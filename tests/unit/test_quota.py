"""Quotas sum to the batch, are never negative, and end the step as early as whole samples allow."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.balance.leases import Quotas, Speed, ideal, lease_sizes, next_size, quotas, split_evenly
from potluck.balance.quota import Estimate

rates = st.floats(1e-3, 1e4)
overheads = st.floats(0, 100)
speeds = st.builds(lambda r, o: Speed(rate_samples_per_s=r, overhead_s=o), rates, overheads)
fleets = st.dictionaries(st.sampled_from("abcdefgh"), speeds, max_size=8)
quick = settings(max_examples=80, deadline=None)


def speed(rate: float, overhead: float = 0.0) -> Speed:
    return Speed(rate_samples_per_s=rate, overhead_s=overhead)


def makespan(batch: int, host_rate: float, guests: dict[str, Speed], shares: dict[str, int]) -> float:
    own = (batch - sum(shares.values())) / host_rate
    return max([own, *(n / guests[g].rate_samples_per_s + guests[g].overhead_s for g, n in shares.items() if n)])


@quick
@given(batch=st.integers(1, 10_000), host=rates, fleet=fleets, keeps=st.integers(0, 3))
def test_quotas_sum_to_the_batch_and_none_is_negative(
    batch: int, host: float, fleet: dict[str, Speed], keeps: int
) -> None:
    result = quotas(batch, host, fleet, keeps)
    assert result.host + sum(result.guests.values()) == batch
    assert all(count >= 1 for count in result.guests.values())
    assert result.host >= min(keeps, batch)
    assert result.guests.keys() <= fleet.keys()


@quick
@given(
    batch=st.integers(1, 100),
    host=st.floats(0, math.inf),
    values=st.lists(st.tuples(*[st.floats(0, math.inf)] * 3, st.integers(1, 2**20)), max_size=5),
)
@example(batch=8, host=1.0, values=[(1e300, 1e300, 0.0, 1)])
@example(batch=8, host=1.0, values=[(math.inf, 0.0, 0.0, 1), (1.0, math.inf, 0.0, 1), (1.0, 0.0, math.inf, 1)])
@example(batch=8, host=0.0, values=[(1.0, 0.0, 0.0, 1)])
@example(batch=8, host=5e-324, values=[(1.0, 0.0, 1.0, 1)])
@example(batch=8, host=5e-324, values=[(1.0, 0.0, math.inf, 1)])
@example(batch=8, host=5e-324, values=[(5e-324, 0.0, 1.0, 1)])
@example(batch=8, host=1.0, values=[(1e11, 0.0, 9e11, 2**20)])
def test_absurd_measurements_do_no_harm(
    batch: int, host: float, values: list[tuple[float, float, float, int]]
) -> None:
    """A guest says what it likes about its speed: the step must still be dealt."""
    fleet = {
        str(i): Speed(rate_samples_per_s=rate, overhead_s=overhead, transfer_s=transfer, usual=1, most=most)
        for i, (rate, overhead, transfer, most) in enumerate(values)
    }
    result = quotas(batch, host, fleet, 1)
    assert result.host + sum(result.guests.values()) == batch
    assert result.host >= 1
    for guest, count in result.guests.items():
        assert sum(lease_sizes(count, fleet[guest])) == count


@quick
@given(batch=st.integers(1, 1000), host=rates, fleet=fleets)
def test_the_closed_form_of_the_design(batch: int, host: float, fleet: dict[str, Speed]) -> None:
    step_s, quota = ideal(batch, host, fleet)
    helping = [fleet[g] for g in quota]
    work = batch + sum(s.rate_samples_per_s * s.overhead_s for s in helping)
    assert step_s == pytest.approx(work / (host + sum(s.rate_samples_per_s for s in helping)))
    for guest, q in quota.items():
        assert q >= 1
        assert q == pytest.approx(fleet[guest].rate_samples_per_s * (step_s - fleet[guest].overhead_s))
    # All are done at the same time, the host with what is left.
    left = batch - sum(quota.values())
    assert left / host == pytest.approx(step_s, rel=1e-6, abs=1e-6 * batch / host)


@quick
@given(batch=st.integers(1, 1000), host=rates, fleet=fleets)
def test_a_guest_never_makes_the_step_longer(batch: int, host: float, fleet: dict[str, Speed]) -> None:
    result = quotas(batch, host, fleet)
    assert result.step_s <= batch / host * (1 + 1e-9)
    assert result.step_s == pytest.approx(makespan(batch, host, fleet, result.guests))


@quick
@given(batch=st.integers(1, 500), host=rates, guest=speeds)
def test_a_guest_sits_out_exactly_when_its_quota_is_under_one(batch: int, host: float, guest: Speed) -> None:
    rate, overhead = guest.rate_samples_per_s, guest.overhead_s
    alone_s = batch / host
    step_s = (batch + rate * overhead) / (host + rate)
    assert (rate * (step_s - overhead) < 1) == (ideal(batch, host, {"g": guest})[1] == {})
    if ideal(batch, host, {"g": guest})[1] == {}:
        assert ideal(batch, host, {"g": guest})[0] == alone_s


def brute_force(batch: int, host: float, guests: dict[str, Speed], keeps: int) -> float:
    """The shortest step over all ways to deal it to these guests."""
    ways = itertools.product(range(batch - keeps + 1), repeat=len(guests))
    return min(makespan(batch, host, guests, dict(zip(guests, way))) for way in ways if sum(way) <= batch - keeps)


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 10),
    host=st.floats(0.1, 10),
    fleet=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(lambda r, o: speed(r, o), st.floats(0.1, 10), st.floats(0, 3)),
        max_size=3,
    ),
)
def test_rounding_takes_the_neighbour_with_the_smaller_makespan(
    batch: int, host: float, fleet: dict[str, Speed]
) -> None:
    _, wanted = ideal(batch, host, fleet)
    result = quotas(batch, host, fleet)
    helping = {g: fleet[g] for g in wanted}
    assert result.step_s == pytest.approx(brute_force(batch, host, helping, 0))
    for guest, q in wanted.items():
        # What rounding down leaves over, less than a sample of each, may all be best with one of them.
        assert math.floor(q) <= result.guests.get(guest, 0) <= math.floor(q) + len(wanted)


def test_the_next_sample_goes_to_the_guest_that_is_done_first() -> None:
    """As long as the host is the last, every guest seems as good: one that is chosen blindly costs 28 % here."""
    fleet = {"a": speed(1.34, 1.4), "b": speed(2.81, 0.8), "c": speed(2.74, 0.8)}
    result = quotas(11, 0.916, fleet)
    assert result.step_s == pytest.approx(2.26, abs=0.01)
    assert result.step_s == pytest.approx(brute_force(11, 0.916, fleet, 0))


def test_the_prototype_rig() -> None:
    """0.15 s a sample on the host, 0.6 s on the guest, 32 samples a step: 3.84 s if nothing were lost."""
    assert quotas(32, 1 / 0.15, {"g": speed(1 / 0.6)}) == Quotas(host=26, guests={"g": 6}, step_s=3.9)
    step_s, quota = ideal(32, 1 / 0.15, {"g": speed(1 / 0.6)})
    assert step_s == pytest.approx(3.84)
    assert quota["g"] == pytest.approx(6.4)
    # With 0.6 s of overhead the guest must be done a sample earlier.
    assert quotas(32, 1 / 0.15, {"g": speed(1 / 0.6, 0.6)}).guests == {"g": 5}


def test_a_guest_that_cannot_deliver_one_sample_sits_out() -> None:
    assert quotas(8, 1.0, {"slow": speed(0.1, 0.0)}) == Quotas(host=8, guests={}, step_s=8.0)
    assert quotas(8, 1.0, {"far": speed(10.0, 20.0)}).guests == {}
    assert quotas(8, 1.0, {"slow": speed(0.1, 0.0), "good": speed(1.0, 0.0)}).guests == {"good": 4}


@quick
@given(
    batch=st.integers(2, 500),
    host=st.floats(0.1, 10),
    rate=st.floats(0.1, 10),
    overhead=st.floats(0, 5),
    faster=st.floats(1, 4),
    slower=st.floats(0, 4),
)
def test_more_speed_gets_more_and_more_overhead_gets_less(
    batch: int, host: float, rate: float, overhead: float, faster: float, slower: float
) -> None:
    def share(rate: float, overhead: float) -> int:
        return quotas(batch, host, {"g": speed(rate, overhead)}).guests.get("g", 0)

    assert share(rate, overhead) <= share(rate * faster, overhead)
    assert share(rate, overhead) >= share(rate, overhead + slower)


def test_equal_guests_get_equal_shares() -> None:
    result = quotas(100, 1.0, {name: speed(1.0) for name in "abcd"}, 1)
    assert result == Quotas(host=20, guests=dict.fromkeys("abcd", 20), step_s=20.0)


def test_the_host_keeps_what_it_must() -> None:
    assert quotas(4, 1e-3, {"a": speed(100.0), "b": speed(100.0)}, 1).host == 1
    assert quotas(1, 1e-3, {"a": speed(100.0)}, 1) == Quotas(host=1, guests={}, step_s=1000.0)


@given(count=st.integers(-3, 500), largest=st.integers(-1, 40))
def test_micro_batches_are_few_and_equal(count: int, largest: int) -> None:
    parts = split_evenly(count, largest)
    assert sum(parts) == max(0, count)
    if parts:
        assert max(parts) <= max(1, largest)
        assert max(parts) - min(parts) <= 1
        assert len(parts) == math.ceil(count / max(1, largest))


def test_an_estimate_follows_and_knows_its_spread() -> None:
    estimate = Estimate()
    for bad in (math.nan, math.inf, -math.inf):
        estimate.add(bad)
    assert estimate.value is None
    estimate.add(10.0)
    assert (estimate.value, estimate.spread) == (10.0, 0.0)
    for _ in range(30):
        estimate.add(20.0)
    assert estimate.value == pytest.approx(20.0, abs=1e-4)
    assert estimate.spread == pytest.approx(0.0, abs=1e-2)
    estimate.add(30.0)
    assert estimate.value == pytest.approx(24.0, abs=1e-3)
    assert estimate.spread == pytest.approx(4.0, abs=1e-2)


# -- doubts


def doubting(*measured: float) -> Estimate:
    estimate = Estimate(doubts=True)
    for value in measured:
        estimate.add(value)
    return estimate


@given(st.floats(0, 1e6))
@example(0.0)
@example(1e300)
def test_one_measurement_far_off_changes_nothing(odd: float) -> None:
    steady = [10.0, 11.0, 9.0, 10.0] * 3
    before, estimate = doubting(*steady), doubting(*steady, odd)
    assert before.value is not None
    if abs(odd - before.value) > 4 * before.spread + 0.25 * before.value:
        assert (estimate.value, estimate.spread) == (before.value, before.spread)
    else:
        assert estimate.value == pytest.approx(before.value + 0.4 * (odd - before.value))


@pytest.mark.parametrize(("odd", "again", "believed"), [(50, 40, 40), (40, 50, 40), (1, 2, 2), (2, 1, 2)])
def test_the_second_one_like_it_is_believed_and_the_milder_counts(odd: int, again: int, believed: int) -> None:
    assert doubting(10, 10, odd, again).value == believed


def test_two_that_contradict_each_other_are_no_truth() -> None:
    estimate = doubting(10, 10, 50, 1)
    assert estimate.value == 10
    estimate.add(2)
    assert estimate.value == 2  # the last two agree


def test_hiccups_every_other_time_get_a_margin_and_one_alone_is_forgotten() -> None:
    assert doubting(10, *[10, 30] * 4).cautious > 13
    assert 10 < doubting(10, 10, 1000, 10).cautious <= 14  # however large it was
    assert doubting(10, 10, 1000, *[10] * 6).cautious == pytest.approx(10, rel=0.02)


def test_a_usual_one_in_between_ends_the_doubt() -> None:
    assert doubting(10, 10, 50, 10, 50, 10, 50).value == 10


def test_a_change_that_lasts_is_followed() -> None:
    estimate = doubting(10, *[100.0] * 4)
    assert estimate.value == 100
    assert doubting(0.0, *[0.3] * 4).value == pytest.approx(0.3)


def test_who_does_not_doubt_follows_at_once() -> None:
    estimate = Estimate()
    estimate.add(10)
    estimate.add(20)
    assert estimate.value == 14


@given(st.integers(0, 2000), st.integers(1, 100))
def test_the_hosts_micro_batches_are_full_but_for_one_or_two_at_the_beginning(left: int, most: int) -> None:
    sizes, rest = [], left
    while rest:
        sizes.append(next_size(rest, most))
        assert 0 < sizes[-1] <= most
        rest -= sizes[-1]
    assert sum(sizes) == left
    assert sizes[2:] == [most] * len(sizes[2:])
    if left > most:
        assert 2 * min(sizes) >= min(most, left - 1), "none so short that the device waits for the next"
        assert len(sizes) <= -(-left // most) + 1
