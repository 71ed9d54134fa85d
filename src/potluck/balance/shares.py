"""Divides a batch between machines in whole samples: equally, or by their speeds. PURE."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from potluck.errors import ConfigError


def equal_shares(batch: int, machines: int) -> list[int]:
    """Equal shares in whole samples; the first machines get one more if the batch does not divide evenly."""
    _check(batch, machines, 1)
    small, extra = divmod(batch, machines)
    return [small + (number < extra) for number in range(machines)]


def whole_shares(batch: int, seconds_per_sample: Sequence[float], least: int = 0) -> list[int]:
    """Whole samples for each machine, at least `least`, so that the last one finishes as early as possible."""
    _check(batch, len(seconds_per_sample), least)
    for seconds in seconds_per_sample:
        if not 0 < seconds < math.inf:
            raise ConfigError(f"a machine's speed is {seconds:g} s/sample", hint="it must be above 0")
    ideal_s = batch / math.fsum(1 / seconds for seconds in seconds_per_sample)
    shares = [max(least, int(ideal_s / seconds * (1 - 1e-12))) for seconds in seconds_per_sample]
    while sum(shares) > batch:  # because of `least`: take from the machine that would finish last
        _, index = max((n * s, i) for i, (n, s) in enumerate(zip(shares, seconds_per_sample)) if n > least)
        shares[index] -= 1
    # Give each remaining sample to the machine that would finish it first.
    queue = [((n + 1) * s, i) for i, (n, s) in enumerate(zip(shares, seconds_per_sample))]
    heapq.heapify(queue)
    for _ in range(batch - sum(shares)):
        _, index = queue[0]
        shares[index] += 1
        heapq.heapreplace(queue, ((shares[index] + 1) * seconds_per_sample[index], index))
    return shares


def _check(batch: int, machines: int, least: int) -> None:
    if machines < 1:
        raise ConfigError("there is no machine to share the batch")
    if batch < least * machines:
        raise ConfigError(
            f"a batch of {batch} samples cannot be shared by {machines} machines",
            hint="the batch must be at least the number of machines",
        )
