"""Writes for a person why a guest sits out or lost its lease, always with the figures that decided it.

PURE. Each function returns the end of a sentence that begins with the guest's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from potluck.balance.leases import Speed
from potluck.hub.members import Member, OpenLease
from potluck.units import seconds_text

TOO_LATE = "it was too late"
ONE_SAMPLE = "a micro-batch of one sample may have caused it"
ONE_SAMPLE_HINT = (
    "a loss that takes std() over its batch is NaN for a micro-batch of one sample. Take it over the whole data "
    "before the loop, or train alone with micro_batch= the loader's batch size"
)


def why_not(speed: Speed, step_s: float, *, guessed: bool) -> str:
    """Why a guest has no part in a step that takes the others `step_s`.

    `guessed`: it has delivered nothing yet, so its link is known only by the time of its first weights.
    """
    least = speed.least.lease
    what, them = ("one sample", "it") if least == 1 else (f"{least} samples", "them")
    least_s, computing_s, step = speed.lease_s(least), least * speed.sample_s, seconds_text(step_s)
    if least_s <= step_s:
        take = "takes" if least == 1 else "take"
        return f"would not make the step shorter: {what} {take} it {seconds_text(least_s)}, the step {step}"
    few = "" if least == 1 else "; fewer are too few for the model's batch statistics"
    return (
        f"cannot deliver {what} within a step: {seconds_text(computing_s)} to compute {them} and "
        f"{seconds_text(least_s - computing_s)} to get its samples and the weights and deliver the gradient"
        f"{' (by what its first weights took)' if guessed else ''}, where the step takes {step}{few}"
    )


def not_finite(*, single: bool) -> str:
    """Why a contribution cannot be right. `single`: one of its micro-batches had one sample."""
    return f"its gradient or its loss is not finite{f'; {ONE_SAMPLE}' if single else ''}"


def why_late(member: Member, lease: OpenLease, *, silent_s: float, now: float) -> tuple[str, str]:
    """Why a lease was not fulfilled in time: with figures, and as a clause without them.

    `silent_s`: how long the guest was silent, if that decided it.
    """
    since = seconds_text(now - lease.started)
    if silent_s:
        return f"sent nothing for {silent_s:.1f} s", "it sent nothing"
    if lease.unread:
        return f"had not been sent its samples after {since}: they are still read", "its samples came late"
    if member.feed.in_flight_bytes:
        return f"was still receiving weights or samples after {since}", "it was still receiving"
    if lease.closing_at is not None and lease.closing_at > now:
        return f"would have delivered only after {seconds_text(lease.closing_at - lease.started)}", TOO_LATE
    return f"did not deliver within {since}", TOO_LATE


def why_slower(with_per_s: float, alone_per_s: float) -> str:
    """The run's samples per second with the guest, and without guests."""
    digits = 0 if min(with_per_s, alone_per_s) >= 100 else 2
    return f"with it the run reaches {with_per_s:,.{digits}f} samples/s, without it {alone_per_s:,.{digits}f}"


def kind_of(reason: str) -> str:
    """The reason without its figures: 4.0 ms and 1.2 s are the same."""
    return re.sub(r"\d[\d,]*(\.\d+)?( (µs|ms|s|min|h)\b)?", "#", reason)


def in_a_row(misses: Sequence[str]) -> str:
    """Why none of these leases counted, each reason once."""
    reasons = list(dict.fromkeys(misses))
    if reasons == [TOO_LATE]:
        return f"was too late {len(misses)} times in a row"
    return f"delivered nothing that counts {len(misses)} times in a row: {'; '.join(reasons)}"
