"""How many samples this machine computes at once: given, or found by doubling while it is faster and fits.

On a busy machine the search can end too early. So half and twice the size are compared with it again occasionally,
at a bounded cost. Where there are no guests, it is first compared with the whole step, as a plain loop computes it.

For a model with batch statistics it is as many as fit, because a second micro-batch makes it learn worse, whatever
the speed.

PURE: measurements are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

from potluck.spec.config import MEMORY_PART, MOST_MICRO_BATCH

WORTH = 0.95
"""A doubling must reduce the time per sample to this part of it, or the search is over."""
SAME = 1.03
"""Sizes within this factor of the best are equally good. The largest of them is chosen, because it overlaps
best."""
TRIALS = 2
"""Measurements of each size; the fastest counts."""
BRIEF_S, BRIEF_TRIALS = 0.01, 8
"""A micro-batch shorter than this is measured this often, because on a busy machine other programs run that long at
a time. With two trials of 1 ms, a model of 4 ms a step settled at 2 samples instead of 32, and a step took 25
ms."""
SHORT_S, CLEARLY_WORSE = 0.02, 2.0
"""A micro-batch shorter than this is doubled unless the time per sample then grows by this factor. A smaller one
gains nothing, and samples of unequal length mislead any number of trials: a model with batches of 32 sentences
settled at 4, and its loop took 2.4 to 6.9 times as long as a plain one."""
MISSES = 8
"""After this many micro-batches in a row of another size (half, or larger) the search ends."""
FIRST_OF_MANY = 8
"""The first micro-batch of a model with batch statistics: it shows how much memory a sample takes, and the second
one has all that fit. A larger first one could be too much for a small device."""

REVIEW_TRIALS = 4
"""Alternating measurements of each of the two sizes that a review compares; the fastest counts."""
FASTER = 0.97
"""A review changes the size if a sample then takes at most this part of its time."""
FIRST_REVIEW, LAST_REVIEW, REVIEW_S = 32, 2048, 2.0
"""Micro-batches between two reviews: initially, and at most, after doubling with each review that changed nothing.
Also the least seconds of computing between them."""
REVIEW_PART = 0.01
"""Reviews may cost this part of the computing time; the next one waits until they are below it."""


@dataclass(slots=True)
class Review:
    """Compares the current size with twice or half of it, and says which to use from then on."""

    now: int
    """The current size."""
    _other: int | None = None
    _trials: dict[int, list[float]] = field(default_factory=dict)
    lag: int = 0
    """See `MicroBatch`."""
    _larger: bool = True
    """Whether the next review tries the larger neighbour."""
    _every: int = FIRST_REVIEW
    _since: int = 0
    _since_s: float = 0.0
    _shortest_s: float = math.inf
    """Times of the micro-batches since the last review: on a busy machine a single one says little."""
    _computed_s: float = 0.0
    _cost_s: float = 0.0
    """Seconds that reviews took more than the same samples at the current size."""
    _missed: int = 0

    def begin_with(self, whole: int) -> None:
        """Compare with the whole step now."""
        self._other, self._trials = whole, {self.now: [], whole: []}

    def size(self) -> int:
        """The size to compute next: in a review, the one that was measured less often."""
        if self._other is None or len(self._trials[self._other]) > len(self._trials[self.now]):
            return self.now
        return self._other

    def record(self, size: int, seconds: float, most: int) -> None:
        """A micro-batch of `size` took this long; none larger than `most` may be tried."""
        self._computed_s += seconds
        if self._other is not None:
            self._compare(size, seconds)
            return
        self._since += 1
        self._since_s += seconds
        self._shortest_s = min(self._shortest_s, seconds)
        affordable = self._cost_s <= REVIEW_PART * self._computed_s
        if self._since >= self._every and self._since_s >= REVIEW_S and affordable:
            self._begin(most, brief=self._shortest_s < 2 * SHORT_S)

    def _begin(self, most: int, *, brief: bool) -> None:
        self._since, self._since_s, self._shortest_s, self._missed = 0, 0.0, math.inf, 0
        larger, smaller = min(2 * self.now, most), self.now // 2
        sizes = [larger] if larger > self.now else []
        sizes += [smaller] if smaller and not brief else []  # nothing is gained by cutting a brief one finer
        if sizes:
            self._other = sizes[0 if self._larger else -1]
            self._trials = {self.now: [], self._other: []}
        self._larger = not self._larger

    def _compare(self, size: int, seconds: float) -> None:
        assert self._other is not None
        # A remainder, or a lease cut into equal parts, rarely has the very size that was asked for.
        near = next((of for of in sorted(self._trials) if of / 2 < size <= of), None)
        if near is None or len(self._trials[near]) >= MISSES:  # a share that the other size never fits into
            self._missed += 1
            if self._missed >= MISSES + self.lag:
                self._other = None
            return
        self._trials[near].append(seconds / size)
        if min(map(len, self._trials.values())) < REVIEW_TRIALS:
            return
        other, self._other = self._other, None
        there, here = self._trials[other], self._trials[self.now]
        self._cost_s += max(0.0, (fmean(there) - fmean(here)) * len(there) * other)
        if min(there) <= FASTER * min(here):
            self._larger = other > self.now  # further in this direction
            self.now, self._every = other, FIRST_REVIEW
        else:
            self._every = min(2 * self._every, LAST_REVIEW)


@dataclass(slots=True)
class MicroBatch:
    """The search for one machine's micro-batch size."""

    fixed: int | None = None
    """The size that was asked for."""
    limit: int = 64
    """The largest size, even if a larger one would be faster."""
    free_bytes: int | None = None
    """The device's free memory before the first micro-batch."""
    settled: int | None = None
    statistics: bool = False
    """The model normalises over the batch: no single sample, and as many at once as fit."""
    reviews: bool = False
    """Whether the found size is reviewed later."""
    whole: bool = False
    """Whether the found size is compared with the whole step first. Only with `reviews`."""
    lag: int = 0
    """Micro-batches that are already cut when another size is asked for."""
    _now: int = 2
    _seconds: dict[int, list[float]] = field(default_factory=dict)
    _bytes_per_sample: float = 0.0
    _warm: bool = False
    _missed: int = 0
    _review: Review | None = None

    def __post_init__(self) -> None:
        self._now = min(FIRST_OF_MANY if self.statistics else self._now, self.limit)

    def size(self) -> int:
        now = self._review.size() if self._review is not None else self.settled
        size = self.fixed or now or self._now
        return max(2, size) if self.statistics else size

    def most(self) -> int:
        """The largest size that fits, if a large one hides more transfer time than it costs."""
        if self.fixed is not None or self.free_bytes is None or not self._bytes_per_sample:
            return self.size()
        return max(self.size(), min(MOST_MICRO_BATCH, self._fitting()))

    @property
    def searching(self) -> bool:
        return self.fixed is None and self.settled is None

    def record(self, size: int, seconds: float, saved_bytes: int = 0) -> None:
        """A micro-batch of `size` took these seconds and kept these bytes for its backward."""
        if size <= 0:
            return
        if not self.searching:
            self._reviewed(size, seconds)
            return
        if saved_bytes:
            self._bytes_per_sample = max(self._bytes_per_sample, saved_bytes / size)
        if not self._warm:
            self._warm = True  # the first micro-batch includes one-time start-up work
            if self.statistics:
                self._all_that_fit()
            return
        if size > self._now or 2 * size <= self._now:
            # Leases are too short for this size, or cut for a thin link: it will not be measured any better.
            self._missed += 1
            if self._missed >= MISSES and self._seconds:
                self._settle()
            elif self._missed >= MISSES and size > self._now:
                self.settled = self._now
            return
        # A lease cut into equal parts rarely has the very size that was asked for.
        self._missed = 0
        trials = self._seconds.setdefault(self._now, [])
        trials.append(seconds / size)
        if len(trials) >= (TRIALS if min(trials) * self._now >= BRIEF_S else BRIEF_TRIALS):
            self._decide()

    def _reviewed(self, size: int, seconds: float) -> None:
        if self.fixed is not None or self.settled is None or self.statistics or not self.reviews:
            return
        if self._review is None:
            self._review = Review(self.settled)
            if self.whole and self.settled < self.limit and self._bytes_per_sample and self._fits(self.limit):
                self._review.begin_with(self.limit)
        self._review.lag = self.lag
        most = self.limit if self._fits(self.limit) else self._fitting()
        self._review.record(size, seconds, most)
        self.settled = self._review.now

    def stop(self) -> None:
        """End the search with the present measurements."""
        if self.searching and self._seconds:
            self._settle()
        elif self.searching:
            self.settled = self._now

    def _all_that_fit(self) -> None:
        """Use the largest size that fits; above MOST_MICRO_BATCH only if the search finds it faster."""
        most = min(self.limit, MOST_MICRO_BATCH)
        if self.free_bytes is not None and self._bytes_per_sample:
            most = min(most, self._fitting())
        self._now = max(self._now, most)
        if self._now < MOST_MICRO_BATCH or self._now == self.limit:
            self.settled = self._now

    def _decide(self) -> None:
        best = {size: min(trials) for size, trials in self._seconds.items()}
        before = best.get(self._now // 2)
        worth = CLEARLY_WORSE if best[self._now] * self._now < SHORT_S else WORTH
        pays = before is None or best[self._now] <= before * worth or self._now <= 2
        if pays and 2 * self._now <= self.limit and self._fits(2 * self._now):
            self._now *= 2
        else:
            self._settle()

    def _settle(self) -> None:
        """The largest size that is as good as the best one measured; among short ones, the largest that is not
        clearly worse."""
        best = {size: min(trials) for size, trials in self._seconds.items()}
        fastest = min(best.values())
        self.settled = max(
            size
            for size, seconds in best.items()
            if seconds <= fastest * (CLEARLY_WORSE if seconds * size < SHORT_S else SAME)
        )

    def _fitting(self) -> int:
        """The largest size, from the free memory and the memory per sample."""
        assert self.free_bytes is not None
        return int(MEMORY_PART * self.free_bytes / self._bytes_per_sample)

    def _fits(self, size: int) -> bool:
        if self.free_bytes is None or not self._bytes_per_sample:
            return True
        return size * self._bytes_per_sample <= MEMORY_PART * self.free_bytes
