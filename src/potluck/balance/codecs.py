"""Which codec a guest should have: int4, or thin where the guest's link is the bottleneck.

PURE. The host and the plan use one rule. thin has half of int4's bytes and takes longer to code: a transfer takes
THIN_PART of int4's time, but no less than the coding. Both are put into the formula of the quotas (`leases.py`);
thin is chosen if the step becomes shorter by LEAST_GAIN, and kept as long as it does by KEEP_GAIN. Where guests
compute more than half of the batch thin costs some loss (docs/log.md), and must gain more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from potluck.balance.leases import Speed, ideal
from potluck.units import percent_text, seconds_text

AUTO, INT4, THIN = "auto", "int4", "thin"
THIN_PART = 0.5
"""thin's bytes ÷ int4's: 2.2 of 4.13 bits up, 1.9 down."""
CODING_S_PER_PARAMETER = 8e-9
"""A message in thin, coded on one core and decoded on another, one piece after the other."""
LEAST_GAIN, KEEP_GAIN = 0.01, 0.003
LARGE_SHARE, LARGE_SHARE_GAIN = 0.5, 0.03
SHORT_PART = 0.01
"""Transfers that take less than this part of a step are no bottleneck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A guest's codec, and why."""

    codec: str
    reason: str
    """A clause for a person."""


def thinner(speed: Speed, coding_s: float) -> Speed:
    """The speed with thin of a guest whose speed with int4 this is."""
    return replace(speed, transfer_s=max(THIN_PART * speed.transfer_s, min(coding_s, speed.transfer_s)))


def choose(
    batch: int,
    host_rate: float,
    guests: Mapping[str, Speed],
    guest: str,
    *,
    coding_s: float,
    late_s: float = 0.0,
    now: str = INT4,
) -> Choice:
    """The codec of one guest.

    Args:
        guests: everybody's speed with the codec they have, but this guest's with int4.
        coding_s: time to code and decode a message in thin.
        late_s: what of the way up, with int4, is part of its overhead: where that way is the longer one.
        now: the codec that this guest has.
    """
    speed = guests[guest]
    alone_s = batch / host_rate
    if 2 * speed.transfer_s + late_s < SHORT_PART * alone_s:
        return Choice(codec=INT4, reason="its link is no bottleneck")
    int4_s, _ = ideal(batch, host_rate, guests)
    saved_s = min((1 - THIN_PART) * late_s, speed.overhead_s)
    thin = replace(thinner(speed, coding_s), overhead_s=speed.overhead_s - saved_s)
    thin_s, quotas = ideal(batch, host_rate, {**guests, guest: thin})
    gain = int4_s / thin_s - 1 if 0 < thin_s < math.inf else 0.0
    share = math.fsum(quotas.values()) / batch
    least = KEEP_GAIN if now == THIN else LARGE_SHARE_GAIN if share > LARGE_SHARE else LEAST_GAIN
    up = f" and {seconds_text(speed.transfer_s + late_s)} back" if late_s else " each way"
    link = f"int4 takes {seconds_text(speed.transfer_s)}{up} on its link, in a step of {seconds_text(int4_s)}"
    if gain >= least:
        return Choice(codec=THIN, reason=f"{link}: thin makes steps {percent_text(gain)} faster")
    return Choice(codec=INT4, reason=f"{link}, where thin would hardly help")
