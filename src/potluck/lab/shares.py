"""Divides a fixed batch between machines: equally, or by their speeds. PURE."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from potluck.errors import ConfigError


def equal_shares(batch: int, machines: int) -> list[int]:
    """As equal as whole samples allow, the first machines one more where it does not come out even."""
    _check(batch, machines)
    small, extra = divmod(batch, machines)
    return [small + (number < extra) for number in range(machines)]


def balanced_shares(batch: int, seconds_per_sample: Sequence[float]) -> list[int]:
    """Shares proportional to the machines' speeds, in whole samples, at least one each.

    No other division into such shares lets the slowest machine end sooner: every sample goes to whoever would
    be done with it first.
    """
    _check(batch, len(seconds_per_sample))
    for seconds in seconds_per_sample:
        if not 0 < seconds < math.inf:
            raise ConfigError(f"a machine's speed is {seconds:g} s/sample", hint="it must be above 0")
    shares = [1] * len(seconds_per_sample)
    next_end = [(2 * seconds, number) for number, seconds in enumerate(seconds_per_sample)]
    heapq.heapify(next_end)
    for _ in range(batch - len(shares)):
        _, number = next_end[0]
        shares[number] += 1
        heapq.heapreplace(next_end, ((shares[number] + 1) * seconds_per_sample[number], number))
    return shares


def _check(batch: int, machines: int) -> None:
    if machines < 1:
        raise ConfigError("there is no machine to share the batch")
    if batch < machines:
        raise ConfigError(
            f"a batch of {batch} samples cannot be shared by {machines} machines",
            hint="global_batch must be at least the number of machines",
        )
