"""Leases on links that take their time: how they are cut, how long they take, and how many samples fit a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import tracemalloc

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from potluck.balance.leases import Quotas, Speed, ideal, lease_sizes, quotas, split_evenly
from potluck.balance.quota import EXTRA_PART, extra_samples

CLOSE = 1 + 1e-9
quick = settings(max_examples=150, deadline=None)


def speed(rate: float, transfer: float = 0.0, overhead: float = 0.0, usual: int = 1, most: int = 1) -> Speed:
    return Speed(
        rate_samples_per_s=rate, overhead_s=overhead, transfer_s=transfer, usual=usual, most=max(usual, most)
    )


speeds = st.builds(
    speed,
    st.floats(0.01, 1000),
    st.one_of(st.just(0.0), st.floats(0, 1), st.floats(0, 60)),
    st.one_of(st.just(0.0), st.floats(0, 20)),
    st.integers(1, 20),
    st.integers(1, 200),
)
fleets = st.dictionaries(st.sampled_from("abcde"), speeds, max_size=5)
host_rates = st.floats(0.1, 100)
SMALL_MOST = speed(1.0, 30.0, most=5)
"""It hides little: 5 samples of the 90 and 45 that would hide all."""
BETWEEN = speed(1.0, 3.0, usual=4, most=10)
"""9 and 5 samples hide all; leases of 11 to 13 are too large for one micro-batch."""
AMPLE = speed(1.0, 3.0, usual=4, most=100)
FLAT = speed(1.0, 10.0, most=100)
"""One sample takes it as long as fifteen."""


# -- a lease


def as_cut_s(guest: Speed, count: int) -> float:
    """What a lease takes by the model in the module's docstring, given how it is cut."""
    sizes = lease_sizes(count, guest)
    second = 1 / guest.rate_samples_per_s
    down_s = max(0.0, guest.transfer_s - sizes[0] * second / 3)
    up_s = max(0.0, guest.transfer_s - 2 * sizes[-1] * second / 3)
    return guest.overhead_s + down_s + count * second + up_s


@quick
@given(guest=speeds, count=st.integers(1, 1000))
@example(guest=BETWEEN, count=12)
@example(guest=SMALL_MOST, count=7)
@example(guest=speed(3.55, 1.75, usual=13), count=45)
@example(guest=speed(1.0, 2.3, usual=8), count=9)
@example(guest=speed(1.0, 2.3, usual=8, most=20), count=9)
def test_a_lease_takes_as_long_as_its_cut_says(guest: Speed, count: int) -> None:
    assert guest.lease_s(count) == pytest.approx(as_cut_s(guest, count))
    assert guest.lease_s(0) == 0.0


@quick
@given(guest=speeds, count=st.integers(0, 1000))
@example(guest=BETWEEN, count=10)
@example(guest=BETWEEN, count=13)
def test_one_sample_more_never_takes_less_time(guest: Speed, count: int) -> None:
    assert guest.lease_s(count) <= guest.lease_s(count + 1) * CLOSE


@quick
@given(guest=speeds, count=st.integers(1, 1000))
def test_a_lease_takes_at_least_both_transfers(guest: Speed, count: int) -> None:
    assert guest.lease_s(count) * CLOSE >= 2 * guest.transfer_s + guest.overhead_s


@quick
@given(guest=speeds, count=st.integers(-2, 2000))
def test_a_cut_has_all_samples_and_no_micro_batch_is_too_large_or_empty(guest: Speed, count: int) -> None:
    sizes = lease_sizes(count, guest)
    assert sum(sizes) == max(0, count)
    assert all(1 <= size <= guest.most for size in sizes)
    assert all(size <= guest.usual for size in sizes[1:-1])
    if not guest.transfer_s:
        assert sizes == split_evenly(count, guest.usual)


@quick
@given(guest=speeds, count=st.integers(2, 60))
@example(guest=speed(43.0, 0.0625, most=5), count=6)
def test_no_cut_hides_more_than_rounding_costs(guest: Speed, count: int) -> None:
    """Only the first and the last micro-batch hide anything: three and more are no better than two."""
    ends = [(n, count - n) for n in range(1, count)] + [(count, count)]
    best = min(
        (
            max(0.0, guest.transfer_s - n * guest.sample_s / 3)
            + max(0.0, guest.transfer_s - 2 * m * guest.sample_s / 3)
            for n, m in ends
            if max(n, m) <= guest.most
        ),
        default=math.inf,
    )
    assert guest.unhidden_s(count) <= best + guest.sample_s / 3 * CLOSE


@pytest.mark.parametrize(
    ("guest", "count", "sizes"),
    [
        (AMPLE, 3, (3,)),
        (AMPLE, 9, (9,)),
        (AMPLE, 13, (13,)),
        (AMPLE, 14, (9, 5)),
        (AMPLE, 24, (9, 4, 3, 3, 5)),
        (BETWEEN, 10, (10,)),
        (BETWEEN, 11, (6, 5)),  # the last one first: its samples hide twice as much
        (BETWEEN, 14, (9, 5)),
        (SMALL_MOST, 5, (5,)),
        (SMALL_MOST, 7, (2, 5)),
        (SMALL_MOST, 12, (5, 1, 1, 5)),
        (speed(1.0, 0.4, usual=4), 10, (4, 3, 3)),  # 2 and 1 samples would do
    ],
)
def test_the_first_and_the_last_micro_batch_are_large_on_a_thin_link(
    guest: Speed, count: int, sizes: tuple[int, ...]
) -> None:
    assert lease_sizes(count, guest) == sizes


# -- the quota of one guest


@settings(max_examples=400, deadline=None)
@given(guest=speeds, count=st.integers(1, 600), more=st.floats(-0.5, 1.5))
@example(guest=speed(1.0, usual=10), count=15, more=0.0)  # between one micro-batch and two
@example(guest=BETWEEN, count=11, more=0.5)
@example(guest=BETWEEN, count=10, more=0.5)
@example(guest=BETWEEN, count=13, more=0.999)
@example(guest=SMALL_MOST, count=5, more=0.5)
@example(guest=SMALL_MOST, count=8, more=0.5)
@example(guest=FLAT, count=1, more=0.0)
@example(guest=FLAT, count=15, more=-0.01)
def test_the_quota_is_the_inverse_of_the_leases_time(guest: Speed, count: int, more: float) -> None:
    """Its whole part fits into the step, and one sample more does not."""
    step_s = guest.lease_s(count) + more * guest.sample_s
    whole = math.floor(guest.quota(step_s) * CLOSE)
    assert guest.lease_s(whole) <= step_s * CLOSE + 1e-9 * guest.sample_s
    assert guest.lease_s(math.floor(guest.quota(step_s)) + 1) * CLOSE >= step_s
    if more >= 1e-3:
        assert whole >= count


@quick
@given(guest=speeds, step_s=st.floats(0, 200), longer=st.floats(0, 50))
def test_a_longer_step_has_no_smaller_quota(guest: Speed, step_s: float, longer: float) -> None:
    assert guest.quota(step_s) <= guest.quota(step_s + longer) * CLOSE + 1e-9
    assert guest.quota(step_s) >= 0


@quick
@given(guest=speeds, part=st.floats(0, 1), step_s=st.floats(0, 200))
def test_a_faster_link_has_no_smaller_quota(guest: Speed, part: float, step_s: float) -> None:
    faster = dataclasses.replace(guest, transfer_s=guest.transfer_s * part)
    assert math.floor(guest.quota(step_s)) <= math.floor(faster.quota(step_s) * CLOSE + 1e-9)


# -- the quotas of all


def makespan(batch: int, host_rate: float, guests: dict[str, Speed], shares: dict[str, int]) -> float:
    own_s = (batch - sum(shares.values())) / host_rate
    return max([own_s, *(guests[g].lease_s(n) for g, n in shares.items())])


@quick
@given(batch=st.integers(1, 2000), host=host_rates, fleet=fleets, keeps=st.integers(0, 3))
@example(batch=100, host=10.0, fleet={"a": speed(5.0, 4.9, most=100)}, keeps=1)
@example(batch=12, host=1.0, fleet={"a": speed(100.0, 5.0, most=64), "b": speed(100.0, 5.0, most=64)}, keeps=3)
def test_quotas_with_transfers_sum_to_the_batch_and_are_done_in_time(
    batch: int, host: float, fleet: dict[str, Speed], keeps: int
) -> None:
    result = quotas(batch, host, fleet, keeps)
    assert result.host + sum(result.guests.values()) == batch
    assert all(count >= 1 for count in result.guests.values())
    assert result.host >= min(keeps, batch)
    assert result.host / host <= result.step_s * CLOSE
    for guest, count in result.guests.items():
        assert fleet[guest].lease_s(count) <= result.step_s * CLOSE
        assert 2 * fleet[guest].transfer_s <= result.step_s * CLOSE
    assert result.step_s <= batch / host * CLOSE, "the host alone would be faster"
    assert result.step_s == pytest.approx(makespan(batch, host, fleet, result.guests))


@quick
@given(batch=st.integers(1, 500), host=host_rates, fleet=fleets)
def test_all_quotas_together_are_the_batch(batch: int, host: float, fleet: dict[str, Speed]) -> None:
    """Or more, where the time is that of a link which lets many samples in as soon as it lets one."""
    step_s, quota = ideal(batch, host, fleet)
    assert host * step_s + sum(quota.values()) >= batch / CLOSE
    earlier = step_s * (1 - 1e-6)
    assert host * earlier + sum(fleet[g].quota(earlier) for g in quota) < batch
    assert all(q >= 1 for q in quota.values())


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 10),
    host=st.floats(0.1, 10),
    fleet=st.dictionaries(
        st.sampled_from("ab"),
        st.builds(
            speed, st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 3), st.integers(1, 3), st.integers(1, 9)
        ),
        max_size=2,
    ),
)
def test_no_way_to_deal_the_samples_ends_sooner(batch: int, host: float, fleet: dict[str, Speed]) -> None:
    helping = {g: fleet[g] for g in ideal(batch, host, fleet)[1]}
    ways = itertools.product(range(batch + 1), repeat=len(helping))
    shortest = min(makespan(batch, host, helping, dict(zip(helping, way))) for way in ways if sum(way) <= batch)
    assert quotas(batch, host, fleet).step_s == pytest.approx(shortest)


@quick
@given(batch=st.integers(1, 500), host=host_rates, guest=speeds, part=st.floats(0, 1))
@example(batch=15, host=1.0, guest=speed(334.0, 0.7023204257081287, most=15), part=0.5)
def test_a_faster_link_never_lengthens_the_step(batch: int, host: float, guest: Speed, part: float) -> None:
    faster = dataclasses.replace(guest, transfer_s=guest.transfer_s * part)
    larger = dataclasses.replace(guest, most=guest.most + 50)
    step_s = quotas(batch, host, {"g": guest}).step_s
    for better in (faster, larger):
        result = quotas(batch, host, {"g": better})
        # Whoever has less than a sample sits out, though one sample might be done: in batches of one to three.
        sits_out = 0.0 if result.guests or not ideal(batch, host, {"g": guest})[1] else 1 / host
        assert result.step_s <= (step_s + sits_out) * CLOSE


@quick
@given(
    batch=st.integers(1, 500), host=host_rates, fleet=fleets, part=st.floats(0, 1), which=st.sampled_from("abcde")
)
def test_a_faster_link_of_one_among_many_costs_at_most_the_rounding(
    batch: int, host: float, fleet: dict[str, Speed], part: float, which: str
) -> None:
    """A sample of the host for each guest: that is what sitting out and whole samples can cost."""
    assume(which in fleet)
    faster = {**fleet, which: dataclasses.replace(fleet[which], transfer_s=fleet[which].transfer_s * part)}
    bound = quotas(batch, host, fleet).step_s + len(fleet) / host
    assert quotas(batch, host, faster).step_s <= bound * CLOSE


def test_a_guest_whose_transfers_alone_exceed_the_step_sits_out() -> None:
    """And one whose transfers just fit is lent what makes a difference, though it could compute 36 meanwhile."""
    assert quotas(100, 10.0, {"g": speed(5.0, 5.01, most=100)}) == Quotas(host=100, guests={}, step_s=10.0)
    result = quotas(100, 10.0, {"g": speed(5.0, 4.9, most=100)})
    assert (result.host, result.guests) == (98, {"g": 2})
    assert result.step_s == pytest.approx(9.8)
    # However fast it computes: the link is what counts.
    assert quotas(100, 10.0, {"g": speed(1e6, 5.01, most=100)}).guests == {}


def test_a_guest_that_may_only_compute_a_little_at_once_hides_less_and_gets_less() -> None:
    shares = [quotas(100, 1.0, {"g": speed(1.0, 15.0, most=most)}).guests["g"] for most in (1, 10, 20, 40)]
    assert shares == sorted(shares)
    assert len(set(shares)) == 4


def test_one_with_a_part_of_a_sample_does_not_shut_out_one_at_the_edge() -> None:
    """The slow guest's half sample makes the step a little too short for the other one's link."""
    edge = speed(5.0, 4.98, most=100)
    assert quotas(100, 10.0, {"edge": edge}).guests.keys() == {"edge"}
    assert quotas(100, 10.0, {"edge": edge, "slow": speed(0.06)}).guests.keys() == {"edge"}


def test_numbers_however_large_cost_no_time_and_no_memory() -> None:
    vast = {
        str(i): speed(rate, transfer, most=2**20)
        for i, (rate, transfer) in enumerate(itertools.product((1e-11, 1.0, 1e11), (1e-300, 1.0, 9e11)))
    }
    started = time.process_time()
    tracemalloc.start()
    try:
        result = quotas(5000, 1.0, vast, 1)
        for guest, count in result.guests.items():
            lease_sizes(min(count, 512), vast[guest])
            extra_samples(count, vast[guest], 1e-9)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.host + sum(result.guests.values()) == 5000
    assert peak_bytes < 1 << 20
    assert time.process_time() - started < 5.0


# -- samples beyond the quota


@quick
@given(
    quota=st.integers(-1, 200),
    guest=speeds,
    host_s=st.floats(0, 10),
    lent=st.integers(0, 20),
    spare=st.integers(-3, 300),
)
def test_the_host_has_work_until_what_it_lent_comes_back(
    quota: int, guest: Speed, host_s: float, lent: int, spare: int
) -> None:
    extra = extra_samples(quota, guest, host_s, lent=lent, spare=spare)
    assert 0 <= extra <= max(0, min(quota, spare))
    if not extra:
        return
    last_s = lease_sizes(quota, guest)[-1] * guest.sample_s
    assert (extra + lent) * host_s <= EXTRA_PART * last_s * CLOSE
    # If it is computed after all, the gradient leaves behind its last micro-batch.
    assert split_evenly(extra, guest.usual)[-1] >= guest.last


def test_a_fast_link_is_lent_more_and_a_thin_one_is_not() -> None:
    assert extra_samples(20, speed(1.0, usual=4), 0.25) == 8
    assert extra_samples(20, speed(1.0, usual=4), 0.25, lent=5) == 3
    assert extra_samples(20, speed(1.0, usual=4), 0.25, spare=2) == 2
    assert extra_samples(5, speed(1.0, usual=4), 0.25) == 4  # cut 3 and 2: two samples' time is left at the last
    assert extra_samples(20, speed(1.0, usual=4), 0.0) == 0
    assert extra_samples(0, speed(1.0, usual=4), 0.25) == 0
    assert extra_samples(20, speed(1.0, 3.0, usual=4, most=100), 0.25) == 0
    assert extra_samples(20, speed(1.0, 2.0, usual=4), 2.0) == 0  # one sample, where three hide the gradient's way
