"""The search for a micro-batch size, with timings that are made up: it ends, fits, and finds what is fast."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.spec.config import MEMORY_PART, MOST_MICRO_BATCH
from potluck.train.microbatch import SAME, MicroBatch

Seconds = Callable[[int], float]


def search(micro: MicroBatch, seconds: Seconds, *, bytes_a_sample: int = 0, rounds: int = 200) -> list[int]:
    """Compute whatever size is asked for; the sizes in the order in which they were tried."""
    tried = []
    for _ in range(rounds):
        if not micro.searching:
            break
        size = micro.size()
        tried.append(size)
        micro.record(size, seconds(size), bytes_a_sample * size)
    return tried


def gpu(size: int) -> float:
    """Up to 16 samples take as long as one; beyond, twice the samples take twice as long."""
    return 0.01 * max(1.0, size / 16)


def cpu(size: int) -> float:
    """Every sample takes the same, and a micro-batch a little by itself."""
    return 0.0001 + 0.01 * size


def test_it_doubles_while_that_pays() -> None:
    micro = MicroBatch(limit=64)
    tried = search(micro, gpu)
    assert micro.settled == 32  # as fast as 16, and it overlaps better
    assert tried == [2, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32]


def test_it_stops_where_doubling_brings_nothing() -> None:
    micro = MicroBatch(limit=64)
    tried = search(micro, cpu)
    assert micro.settled is not None
    assert cpu(micro.settled) / micro.settled <= 0.01 * SAME * 1.01
    assert max(tried) <= 8


def test_a_size_that_is_slower_is_not_taken() -> None:
    """Beyond 4 samples the cache is too small."""
    micro = MicroBatch()
    search(micro, lambda size: size * (0.01 if size <= 4 else 0.02) + 0.02)
    assert micro.settled == 4


def test_the_first_micro_batch_does_not_count() -> None:
    """It pays for allocations, autotuning and the like."""
    micro, calls = MicroBatch(), []

    def seconds(size: int) -> float:
        calls.append(size)
        return 100.0 if len(calls) == 1 else gpu(size)

    search(micro, seconds)
    assert micro.settled == 32


def test_one_slow_trial_does_not_decide() -> None:
    micro, calls = MicroBatch(), []

    def seconds(size: int) -> float:
        calls.append(size)
        return gpu(size) * (5.0 if len(calls) % 2 == 0 else 1.0)

    search(micro, seconds)
    assert micro.settled == 32


@pytest.mark.parametrize("limit", [1, 3, 16, 20])
def test_no_size_is_above_the_limit(limit: int) -> None:
    micro = MicroBatch(limit=limit)
    assert max(search(micro, gpu)) <= limit
    assert micro.settled is not None
    assert micro.settled <= limit


def test_no_size_is_tried_that_would_not_fit() -> None:
    micro = MicroBatch(limit=64, free_bytes=1000)
    tried = search(micro, gpu, bytes_a_sample=100)
    assert max(tried) == 4  # 8 samples would take 800 bytes of the 500 that may be used
    assert micro.settled == 4
    assert max(tried) * 100 <= MEMORY_PART * 1000


def test_a_size_that_was_asked_for_is_not_searched() -> None:
    micro = MicroBatch(fixed=5)
    assert not micro.searching
    micro.record(5, 1.0)
    assert (micro.size(), micro.settled) == (5, None)


def test_a_size_from_a_checkpoint_stays() -> None:
    micro = MicroBatch(settled=12)
    micro.record(12, 1.0)
    assert (micro.size(), micro.searching) == (12, False)


def test_leases_that_are_cut_evenly_count_as_the_size_they_come_near() -> None:
    """Six samples at a micro-batch of 4 are computed as 3 and 3, and never as 4."""
    micro = MicroBatch(limit=16)
    for _ in range(60):
        if not micro.searching:
            break
        parts = -(-6 // micro.size())
        micro.record(6 // parts, gpu(6 // parts))
    assert micro.settled == 8


def test_leases_too_small_for_a_larger_size_end_the_search() -> None:
    micro = MicroBatch(limit=64)
    for _ in range(60):
        if not micro.searching:
            break
        size = min(2, micro.size())
        micro.record(size, gpu(size))
    assert micro.settled == 2


def test_leases_of_one_sample_say_nothing_about_larger_ones() -> None:
    micro = MicroBatch(limit=64)
    for _ in range(60):
        micro.record(1, 0.01)
    assert (micro.size(), micro.searching) == (2, True)
    search(micro, gpu)
    assert micro.settled == 32


def test_larger_ones_than_asked_for_say_nothing() -> None:
    """The common batch of a parity check can have more samples than this machine computes at once so far."""
    micro = MicroBatch()
    for _ in range(4):
        micro.record(4, 0.01)
    assert micro.size() == 2
    assert micro.searching


def test_where_all_are_cut_large_for_a_thin_link_the_search_ends() -> None:
    micro = MicroBatch()
    for _ in range(20):
        micro.record(26, 0.01)
    assert (micro.size(), micro.searching) == (2, False)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(-1, 70), max_size=200),
    times=st.randoms(use_true_random=False),
    limit=st.integers(1, 64),
)
def test_it_always_ends_within_its_limits(sizes: list[int], times: object, limit: int) -> None:
    micro = MicroBatch(limit=limit, free_bytes=10_000)
    for size in sizes:
        micro.record(size, times.random() + 1e-3, 10 * max(size, 0))  # type: ignore[attr-defined]
        assert 1 <= micro.size() <= limit
    search(micro, lambda size: times.random() + 1e-3)  # type: ignore[attr-defined]
    assert not micro.searching
    assert 1 <= micro.size() <= limit


# -- the most at once


def test_a_size_that_was_asked_for_is_also_the_most() -> None:
    micro = MicroBatch(fixed=5, free_bytes=10**12)
    micro.record(5, 1.0, 500)
    assert micro.most() == 5


def test_the_most_is_what_fits() -> None:
    micro = MicroBatch(limit=64, free_bytes=10_000)
    assert micro.most() == micro.size() == 2  # nobody knows yet what a sample takes
    micro.record(2, 0.01, 200)
    assert micro.most() == MEMORY_PART * 10_000 / 100 == 50
    micro.record(2, 0.01, 400)  # the largest that was seen counts
    assert micro.most() == 25


def test_where_the_memory_is_unknown_the_most_is_the_usual() -> None:
    micro = MicroBatch(limit=64)
    search(micro, gpu, bytes_a_sample=100)
    assert micro.most() == micro.size() == 32
    without = MicroBatch(limit=64, free_bytes=10**12)
    search(without, gpu)  # what a sample takes is unknown
    assert without.most() == without.size() == 32


def test_the_most_has_a_limit_and_is_never_below_the_usual() -> None:
    micro = MicroBatch(limit=64, free_bytes=10**12)
    search(micro, gpu, bytes_a_sample=1)
    assert (micro.size(), micro.most()) == (32, MOST_MICRO_BATCH)
    micro.free_bytes = 10  # what is free now says nothing about what has been computed already
    assert micro.most() == 32


@given(free=st.integers(0, 10**12), saved=st.integers(0, 10**12), settled=st.none() | st.integers(1, 300))
def test_the_most_never_asks_for_more_memory_than_it_may(free: int, saved: int, settled: int | None) -> None:
    micro = MicroBatch(free_bytes=free)
    micro.record(2, 0.1, saved)
    micro.settled = settled
    assert micro.size() <= micro.most() <= max(MOST_MICRO_BATCH, micro.size())
    if micro.most() > micro.size():
        assert micro.most() * saved / 2 <= MEMORY_PART * free * (1 + 1e-9)


def test_short_micro_batches_are_measured_until_one_was_undisturbed() -> None:
    """On a busy machine most are interrupted for longer than they take."""
    micro, calls = MicroBatch(limit=32), []

    def seconds(size: int) -> float:
        calls.append(size)
        return 0.001 + 0.00002 * size + (0.003 if len(calls) % 7 else 0.0)

    search(micro, seconds)
    assert micro.settled == 32


def test_samples_of_unequal_length_do_not_end_the_search_early() -> None:
    """A short batch right after a long one looks as if the smaller size were the faster one."""
    micro, calls = MicroBatch(limit=32), []

    def seconds(size: int) -> float:
        calls.append(size)
        length = 1.0 if size <= 4 else 1.8  # the first batches were short ones
        return (0.001 + 0.0001 * size) * length

    search(micro, seconds)
    assert micro.settled == 32


# -- reviews


def computed(micro: MicroBatch, seconds: Seconds, micro_batches: int) -> float:
    """Go on computing; the seconds that took."""
    total = 0.0
    for _ in range(micro_batches):
        size = micro.size()
        took = seconds(size)
        micro.record(size, took)
        total += took
    return total


def overhead(size: int) -> float:
    """A micro-batch has 40 ms of its own and 5 ms a sample."""
    return 0.04 + 0.005 * size


def test_a_size_that_was_found_on_a_busy_machine_is_found_anew_later() -> None:
    micro, calls = MicroBatch(limit=64, reviews=True), []

    def busy(size: int) -> float:
        """Another program has the processor just when the size 4 is tried."""
        calls.append(size)
        return overhead(size) * (3.0 if size == 4 else 1.0)

    search(micro, busy)
    assert micro.settled == 2
    computed(micro, overhead, 600)
    assert micro.settled == 64


def test_a_size_that_was_found_too_large_shrinks_again() -> None:
    micro = MicroBatch(limit=64, reviews=True)
    micro.settled = 32
    computed(micro, lambda size: size * (0.01 if size <= 16 else 0.02) + 0.02, 600)
    assert micro.settled == 16


def run_alone(seconds: Seconds, *, limit: int, free: int | None = 10_000) -> MicroBatch:
    """The sizes of steps of `limit` samples, until the first review is over."""
    micro = MicroBatch(limit=limit, free_bytes=free, reviews=True, whole=True)
    for _ in range(60):
        left = limit
        while left:
            size = min(micro.size(), left)
            micro.record(size, seconds(size), size)
            left -= size
    return micro


def test_the_whole_step_is_taken_if_it_is_faster_than_the_found_size() -> None:
    def slower_in_between(size: int) -> float:
        return size * (0.01 if size <= 4 else 0.02 if size < 50 else 0.005)

    assert run_alone(slower_in_between, limit=64).settled == 64
    assert run_alone(slower_in_between, limit=50).settled == 50
    assert run_alone(lambda size: size * (0.01 if size <= 4 else 0.02), limit=64).settled == 4


def test_the_whole_step_is_not_tried_where_it_may_not_fit() -> None:
    assert run_alone(cpu, limit=64, free=100).settled in (2, 4, 8)


@given(slow=st.lists(st.floats(1.0, 3.0), min_size=8, max_size=8))
def test_a_search_that_was_disturbed_does_not_make_the_loop_slower_than_a_plain_one(slow: list[float]) -> None:
    """A micro-batch of any size costs something by itself, so one that is far too small is slow."""
    noise = iter(slow)  # while it searches
    micro = run_alone(lambda size: (0.02 + 0.001 * size) * next(noise, 1.0), limit=64)
    assert micro.settled == 64


def test_reviews_are_cheap() -> None:
    """Where every other size is twice as slow, all of them together cost a hundredth."""

    def seconds(size: int) -> float:
        return 0.004 * size * (1.0 if size == 16 else 2.0)

    micro = MicroBatch(limit=64, settled=16, reviews=True)
    tried: list[int] = []
    took = computed(micro, lambda size: tried.append(size) or seconds(size), 20_000)  # type: ignore[func-returns-value]
    assert took <= 1.011 * seconds(16) / 16 * sum(tried)
    assert {8, 32} <= set(tried)
    assert micro.settled == 16


def test_reviews_on_a_noisy_machine_stay_near_the_best() -> None:
    random = Random(3)
    micro = MicroBatch(limit=64, settled=8, reviews=True)
    samples = took = 0.0
    for _ in range(4000):
        size = micro.size()
        seconds = overhead(size) * (1.0 if random.random() < 0.6 else random.uniform(1.2, 3.0))
        micro.record(size, seconds)
        samples, took = samples + size, took + overhead(size)
    assert took / samples <= 1.05 * overhead(64) / 64


def test_no_review_asks_for_more_than_fits_or_than_a_step_has() -> None:
    micro = MicroBatch(limit=48, free_bytes=10_000, reviews=True)
    tried = search(micro, overhead, bytes_a_sample=120)
    computed(micro, lambda size: tried.append(size) or overhead(size), 1000)  # type: ignore[func-returns-value]
    assert max(tried) == 41 <= MEMORY_PART * 10_000 / 120
    roomy = MicroBatch(limit=48, settled=32, reviews=True)
    computed(roomy, overhead, 1000)
    assert roomy.settled == 48


def test_without_reviews_and_with_a_size_that_was_asked_for_nothing_is_tried() -> None:
    for micro in (MicroBatch(limit=64, settled=2), MicroBatch(limit=64, fixed=2, reviews=True)):
        computed(micro, overhead, 300)
        assert micro.size() == 2


def test_a_review_that_gets_other_sizes_ends() -> None:
    """Leases of one sample say nothing about 4 and 8."""
    micro = MicroBatch(limit=16, settled=4, reviews=True)
    for _ in range(200):
        micro.record(1, 0.1)
    assert micro.size() == 4


def test_a_review_of_a_size_that_never_fits_ends() -> None:
    """A share of 30 is never cut into 64: each micro-batch is one of the size in use."""
    micro = MicroBatch(limit=64, settled=32, reviews=True)
    asked = []
    for _ in range(400):
        asked.append(micro.size())
        micro.record(30, 0.1)
    assert 64 in asked, "a review began"
    assert asked.count(64) < 100
