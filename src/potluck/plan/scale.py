"""Predictions for the same fleet with more and more guests, until the host's link is full and beyond.

PURE. Samples are real numbers here, and guests are counted by kind, so that a thousand machines take no longer than
ten.

Flat: all guests at one hub. With k of them helping, each has a k-th of the host's link; one more makes the step
shorter until its two transfers are no longer hidden. The best k that a run admits is taken, the others sit out.

Tree: every hub has f guests, of which some are hubs themselves; d levels reach n guests when f + f² + … + f^d ≥ n.
Pieces of weights are passed on down, pieces of summed gradients up, as they arrive, so that a transfer takes W(f)
and every level adds only the cost of handling a piece. The host's link carries f messages instead of n:

    o = d·fixed + the part of W(f) that no micro-batch hides, each way

The best f is taken. Potluck builds no such tree; this is what one would gain.

Ring: B/Σr + 2(N−1)/N·S/bw + 2(N−1)·α + u, in fp32, nothing overlapped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from potluck.balance.codecs import codec_bytes
from potluck.balance.leases import Speed
from potluck.errors import ConfigError
from potluck.plan.collective_costs import ring_all_reduce_s, slowest_link
from potluck.plan.hub import HUB_BYTES_PER_S, speed_of
from potluck.plan.rank_strategies import RING_PART, fastest_alone_s
from potluck.spec.config import MOST_GUESTS
from potluck.spec.fleet import Fleet, FleetMachine, Job

MOST_PLANNED = 65_536
FANS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
HALVINGS = 60


class ScaleRow(Struct, frozen=True, kw_only=True):
    """The prediction for one number of guests."""

    guests: int
    ideal: float
    flat: float
    """Speed-up with one hub over the fastest machine alone."""
    helping: int
    """Number of guests that the hub uses."""
    link_busy: float
    """Share of the step in which the host's link sends weights (and for as long receives gradients)."""
    tree: float
    fan: int
    levels: int
    ring: float


class Scale(Struct, frozen=True, kw_only=True):
    rows: tuple[ScaleRow, ...]
    full_at: int | None
    """Number of guests from which one more does not shorten the step; None: not in this range."""
    words: str


def scale(job: Job, fleet: Fleet, most: int) -> Scale:
    """Predictions for 1, 2, 4 … `most` guests, copies of the fleet's own in turn."""
    _check_guests(fleet)
    if not 1 <= most <= MOST_PLANNED:
        raise ConfigError(f"a plan cannot have {most} guests", hint=f"choose 1 to {MOST_PLANNED}")
    counts = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
    rows = tuple(_row(job, fleet, count) for count in counts)
    full = full_at(job, fleet, most)
    return Scale(rows=rows, full_at=full, words=_words(job, fleet, rows, full))


def _check_guests(fleet: Fleet) -> None:
    if not fleet.guests:
        raise ConfigError("there is no guest to multiply", hint="give at least two machines")
    if any(m.node for m in fleet.machines):
        raise ConfigError(
            "machines with several devices cannot be multiplied", hint="name each machine: --machine a=8xH100 …"
        )


def many(fleet: Fleet, count: int) -> Fleet:
    """The fleet with this many guests, copies of its own in turn."""
    _check_guests(fleet)
    names = (replace(fleet.guests[i % len(fleet.guests)], name=f"guest-{i + 1}") for i in range(count))
    return Fleet(machines=(replace(fleet.host, name="host"), *names))


def _kinds(fleet: Fleet, count: int) -> list[tuple[FleetMachine, int]]:
    """Each kind of guest and its number, the fastest first."""
    small, extra = divmod(count, len(fleet.guests))
    kinds = [(guest, small + (i < extra)) for i, guest in enumerate(fleet.guests)]
    return sorted(((g, n) for g, n in kinds if n), key=lambda kind: -kind[0].samples_per_s)


def _first(kinds: Sequence[tuple[FleetMachine, int]], count: int) -> list[tuple[FleetMachine, int]]:
    taken = []
    for guest, number in kinds:
        now = min(number, count)
        if now:
            taken.append((guest, now))
        count -= now
    return taken


def _step_s(job: Job, host: FleetMachine, kinds: Sequence[tuple[Speed, int]]) -> float:
    """T with host_rate·T + Σ n_k·q_k(T) = B; a quota below one sample counts as 0."""
    least_s, most_s = 0.0, job.batch * host.sample_s
    for _ in range(HALVINGS):
        middle_s = (least_s + most_s) / 2
        quotas = ((speed.quota(middle_s), number) for speed, number in kinds)
        done = host.samples_per_s * middle_s + math.fsum(q * n for q, n in quotas if q >= 1)
        least_s, most_s = (middle_s, most_s) if done < job.batch else (least_s, middle_s)
    return most_s


def flat_s(job: Job, fleet: Fleet, helping: int, guests: int) -> float:
    """Step time with one hub, if this many guests help."""
    kinds = _first(_kinds(fleet, guests), helping)
    speeds = [(speed_of(job, fleet.host, g, max(1, helping)), n) for g, n in kinds]
    return _step_s(job, fleet.host, speeds) + fleet.host.update_s


def full_at(job: Job, fleet: Fleet, most: int) -> int | None:
    """The number of guests from which one more does not help."""
    if flat_s(job, fleet, 1, most) > flat_s(job, fleet, 0, most) * (1 - 1e-9):
        return 0
    low, high = 1, min(most, MOST_GUESTS)
    while low < high:
        middle = (low + high) // 2
        if flat_s(job, fleet, middle + 1, most) < flat_s(job, fleet, middle, most) * (1 - 1e-9):
            low = middle + 1
        else:
            high = middle
    return low if low < most else None


def _best_flat(job: Job, fleet: Fleet, guests: int) -> tuple[int, float]:
    admitted = min(guests, MOST_GUESTS)
    tried = {0, admitted, full_at(job, fleet, guests) or 0} | {2**i for i in range(admitted.bit_length())}
    return min(((n, flat_s(job, fleet, n, guests)) for n in sorted(tried)), key=lambda pair: pair[1])


def levels_of(guests: int, fan: int) -> int:
    """The least d with f + f² + … + f^d ≥ n."""
    levels, reached, width = 0, 0, 1
    while reached < guests:
        width *= fan
        reached += width
        levels += 1
    return levels


def tree_s(job: Job, fleet: Fleet, guests: int, fan: int) -> float:
    """A step with hubs of hubs. Every hub's link is as good as the slower of the guest's own and the host's."""
    levels = levels_of(guests, fan)
    speeds = []
    for guest, number in _kinds(fleet, guests):
        hub = replace(fleet.host, link_bytes_per_s=min(guest.bytes_per_s, fleet.host.bytes_per_s))
        speed = speed_of(job, hub, guest, min(fan, guests))
        speeds.append((dataclasses.replace(speed, overhead_s=levels * speed.overhead_s), number))
    return _step_s(job, fleet.host, speeds) + fleet.host.update_s


def ring_step_s(job: Job, fleet: Fleet, guests: int) -> float:
    kinds = _kinds(fleet, guests)
    rates = fleet.host.samples_per_s + math.fsum(g.samples_per_s * n for g, n in kinds)
    rate = RING_PART * slowest_link([fleet.host.bytes_per_s, *(g.bytes_per_s for g, _ in kinds)])
    latency_s = 2 * max([fleet.host.latency_s, *(g.latency_s for g, _ in kinds)])
    wire_s = ring_all_reduce_s(job.gradient_bytes, guests + 1, rate, latency_s)
    return job.batch / rates + wire_s + max([fleet.host.update_s, *(g.update_s for g, _ in kinds)])


def _row(job: Job, fleet: Fleet, guests: int) -> ScaleRow:
    helping, step_s = _best_flat(job, fleet, guests)
    alone_s = fastest_alone_s(job, fleet)
    fans = [fan for fan in FANS if fan <= guests] or [1]
    fan = min(fans, key=lambda f: tree_s(job, fleet, guests, f)) if guests > 1 else 1
    rates = math.fsum(g.samples_per_s * n for g, n in _kinds(fleet, guests))
    host_rate = min(fleet.host.bytes_per_s, HUB_BYTES_PER_S)
    return ScaleRow(
        guests=guests,
        ideal=alone_s / (job.batch / (fleet.host.samples_per_s + rates) + fleet.host.update_s),
        flat=alone_s / step_s,
        helping=helping,
        link_busy=helping * codec_bytes(job.codec) * job.parameters / host_rate / step_s,
        tree=alone_s / min(step_s, tree_s(job, fleet, guests, fan)),
        fan=fan,
        levels=levels_of(guests, fan) if fan > 1 else 1,
        ring=alone_s / ring_step_s(job, fleet, guests),
    )


def _words(job: Job, fleet: Fleet, rows: Sequence[ScaleRow], full: int | None) -> str:
    last = rows[-1]
    if full == 0:
        return "not even one guest helps: its two transfers take longer than a step"
    if full is None:
        return f"one hub serves {last.guests} guests: {last.flat:.2f}× of {last.ideal:.2f}×"
    whose = "link" if fleet.host.bytes_per_s < HUB_BYTES_PER_S else f"transport ({HUB_BYTES_PER_S / 1e9:g} GB/s)"
    if full == MOST_GUESTS:
        why = f"a run admits {MOST_GUESTS}"
    else:
        why = f"each has a smaller part of the host's {whose}, and computing no longer hides its two transfers"
    if last.guests >= job.batch / 2:
        why += f"; a step has only {job.batch:,} samples"
    text = f"from {full} guest{'s' * (full > 1)} on one more does not help: {why}"
    if last.tree > 1.02 * last.flat:
        text += f"; a tree of hubs, {last.fan} guests each, would give {last.tree:.2f}× instead of {last.flat:.2f}×"
    if last.ring > 1.02 * max(last.flat, last.tree):
        text += f"; with {last.guests} guests DDP's ring is faster: {last.ring:.2f}×"
    return text
