"""Which codec a guest should have: int4, or thin where the guest's link is the bottleneck.

PURE. The host and the plan use the same rule. thin has half of int4's bytes and takes longer to code: a transfer
takes THIN_PART of int4's time, but no less than the coding. Both go into the formula of the quotas (`leases.py`).
The gain in speed must outweigh thin's cost in loss: faster steps mean more steps in the same time, and
LOSS_OF_ONE_PERCENT is the value of one percent more steps. thin is chosen when the gain is twice its cost, and kept
while the gain exceeds the cost. If guests compute more than half of the batch, its cost was not measured; the
largest cost allowed at half is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from potluck.balance.leases import Speed, ideal
from potluck.spec.fleet import FP32_BYTES
from potluck.units import percent_text, seconds_text

AUTO, INT4, THIN = "auto", "int4", "thin"
"""auto is no codec, but the choice of one for each guest by its link."""
BLOCK = 128
"""Values with a common scale in the codecs that have scales."""
_BYTES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + 2 / BLOCK, "int4": 0.5 + 2 / BLOCK}
"""Bytes per parameter of each codec; a scale has two bytes."""
_THIN_BITS = 2.05
"""Bits per parameter of thin, the mean of both directions; the length of its messages depends on the values."""
_TOPK_BYTES = 6.0
DEFAULT_TOPK_RATIO = 0.01


def codec_bytes(codec: str) -> float:
    """Bytes sent for one parameter, the mean of both directions if they differ."""
    family, _, ratio = codec.partition(":")
    if family == "topk":
        return _TOPK_BYTES * float(ratio or DEFAULT_TOPK_RATIO)
    if family == "thin":
        return (_THIN_BITS - math.log2(float(ratio or 1.0))) / 8
    if family == "auto":
        return _BYTES["int4"]  # what it starts with
    return _BYTES.get(family, float(FP32_BYTES))


THIN_PART = codec_bytes(THIN) / codec_bytes(INT4)
"""thin's bytes ÷ int4's, the mean of both ways: 0.50 (2.19 and 1.90 bits of 4.13; `bench/gpu/thin_loss.py`)."""
CODING_S_PER_PARAMETER = 4 / 1612e6
"""A gradient in thin, coded with feedback at 1,612 MB of float32 a second by one core of the slower of two boxes
(`bench/codec.py`, pieces of 1 Mi). The other reached 3,098. Decoding takes a third as long, beside it."""

LOSS_OF_ONE_PERCENT = 0.0046
"""A GPT of 10.9 M parameters ends at 1.330 after 600 steps and at 1.143 after 900: 0.187 · ln 1.01 ÷ ln 1.5."""
THIN_LOSS, MOST_THIN_LOSS = 0.0022, 0.012
"""thin's cost in loss if guests compute a quarter of the batch, and the largest allowed cost if they compute half,
where none was found (docs/performance.md)."""
KEEP_GAIN = 0.01 * THIN_LOSS / LOSS_OF_ONE_PERCENT
LEAST_GAIN = 2 * KEEP_GAIN
LARGE_SHARE, LARGE_SHARE_GAIN = 0.5, 0.01 * MOST_THIN_LOSS / LOSS_OF_ONE_PERCENT
NO_GAIN = 1e-6
SHORT_PART = LEAST_GAIN
"""Transfers that take less than this part of a step are no bottleneck: thin could save no more than all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A guest's codec, and why."""

    codec: str
    reason: str
    """The reason, as a clause for a person."""


def thinner(speed: Speed, coding_s: float) -> Speed:
    """A guest's speed with thin, from its speed with int4."""
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
        guests: every guest's speed with its codec, but this guest's with int4.
        coding_s: time to code and decode a message in thin.
        late_s: part of the upload time, with int4, that is in its overhead, if the upload is the slower direction.
        now: this guest's present codec.
    """
    speed = guests[guest]
    alone_s = batch / host_rate
    if 2 * speed.transfer_s + late_s < SHORT_PART * alone_s:
        return Choice(codec=INT4, reason="its link is fast enough")
    int4_s, _ = ideal(batch, host_rate, guests)
    saved_s = min((1 - THIN_PART) * late_s, speed.overhead_s)
    thin = replace(thinner(speed, coding_s), overhead_s=speed.overhead_s - saved_s)
    thin_s, quotas = ideal(batch, host_rate, {**guests, guest: thin})
    gain = int4_s / thin_s - 1 if 0 < thin_s < math.inf else 0.0
    share = math.fsum(quotas.values()) / batch
    least = KEEP_GAIN if now == THIN else LARGE_SHARE_GAIN if share > LARGE_SHARE else LEAST_GAIN
    up = f" and {seconds_text(speed.transfer_s + late_s)} back" if late_s else " each way"
    link = f"int4 takes {seconds_text(speed.transfer_s)}{up}, in a step of {seconds_text(int4_s)}"
    if gain >= least:
        reason = f"its link is slow, and steps are {percent_text(gain)} faster with thin ({link})"
        return Choice(codec=THIN, reason=reason)
    if not quotas.get(guest):
        return Choice(codec=INT4, reason=f"its link is too slow for thin, too ({link})")
    if gain < NO_GAIN:
        return Choice(codec=INT4, reason=f"its link is fast enough ({link}, while it computes)")
    return Choice(codec=INT4, reason=f"thin would make steps hardly faster ({link})")
