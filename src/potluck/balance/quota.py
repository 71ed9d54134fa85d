"""Estimates a guest's speed and decides how many samples it gets beyond its quota.

PURE. `balance/leases.py` decides how many samples a guest gets, so that predictions and the host use one formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from potluck.balance.leases import Speed, lease_sizes, split_evenly

EXTRA_PART = 0.5
DOUBT_SPREADS = 4.0
DOUBT_PART = 0.25
"""A measurement this far off (in spreads, and as a share of the value) may be an outlier."""


@dataclass(slots=True)
class Estimate:
    """A running mean that follows changes quickly, with its spread (mean absolute deviation)."""

    value: float | None = None
    spread: float = 0.0
    weight: float = 0.4
    """Weight of the newest measurement."""
    doubts: bool = False
    """Ignore one outlier; accept the value if a second measurement is like it."""
    jumps: bool = False
    """Accept an outlier at once."""
    _doubted: float | None = None
    _hiccup: float = 0.0

    @property
    def cautious(self) -> float:
        """The value with a margin: its spread, and enough to tolerate a hiccup every other time."""
        return (self.value or 0.0) + self.spread + self._hiccup

    def add(self, measured: float) -> None:
        if not math.isfinite(measured):
            return
        if self.value is None:
            self.value = measured
            return
        off = measured - self.value
        if self.doubts and abs(off) > DOUBT_SPREADS * self.spread + DOUBT_PART * abs(self.value):
            again = self._doubted is not None and (self._doubted > self.value) == (off > 0)
            if again:
                assert self._doubted is not None
                # The milder of the two: what both agree on.
                self.value += min(abs(self._doubted - self.value), abs(off)) * (1 if off > 0 else -1)
            self._doubted = None if again else measured
            self._hiccup += self.weight * (min(abs(off), abs(self.value)) - self._hiccup)
            return
        self._doubted = None
        self._hiccup *= 1 - self.weight
        self.spread += self.weight * (abs(off) - self.spread)
        jump = self.jumps and abs(off) > DOUBT_PART * abs(self.value)
        self.value += off if jump else self.weight * off


def extra_samples(
    quota: int, speed: Speed, host_sample_s: float, *, lent: int = 0, spare: int | None = None
) -> int:
    """How many samples beyond its quota a guest gets, in case it is faster than estimated.

    The guest returns what it does not compute when it starts its last micro-batch. The host must still have its own
    work then. So all extras together (`lent`: those that others already have) are at most what the host computes in
    half of that micro-batch's time, and no more than it can spare. A slow link allows no extras, because the last
    micro-batch is sized to hide sending the gradient. With batch statistics there are none either: a lease is one
    micro-batch there, so extras would come back in every step as one more micro-batch on the host.
    """
    usual = max(1, min(speed.usual, speed.most))
    if quota < 1 or host_sample_s <= 0 or speed.last > usual or speed.least.lease > 1:
        return 0
    last_s = lease_sizes(quota, speed)[-1] * speed.sample_s
    together = int(min(EXTRA_PART * last_s / host_sample_s, quota + lent))
    extra = min(together - lent, quota if spare is None else spare)
    return extra if extra > 0 and split_evenly(extra, usual)[-1] >= speed.last else 0
