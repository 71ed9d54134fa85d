"""The step time of potluck: a host that never waits, and guests that compute what they can deliver in time.

PURE. It uses the host's own formula (`balance/leases.py`), with predicted instead of measured times.

A coded message of b·P bytes takes W seconds each way, over the slower of the guest's link and its part of what
the host carries, which all guests that help use at the same times (the change leaves for all when the step
begins, the gradients arrive from all when it ends):

    W_i = b·P / min(link_i, link_host/k, hub/k) + α_i + α_host        k guests that help

(devices of one node share its link; those beside the host use none)

    T = (B + Σ r_i·o_i) / (r_h + Σ r_i),  o_i = fixed + the part of both transfers that no micro-batch hides

and a step takes T + u, because the guests wait for the host's update. Guests whose quota is under one sample sit
out, the slowest first; then the others share the host's link. A run admits `MOST_GUESTS` guests: of a larger fleet
only the fastest count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from potluck.balance.codecs import AUTO, CODING_S_PER_PARAMETER, INT4, THIN, Choice, choose, codec_bytes, thinner
from potluck.balance.leases import Quotas, Speed, quotas
from potluck.plan.collective_costs import shared_nic_bytes_per_s
from potluck.plan.rank_strategies import WAIT_WORTH_S, alone_s, fastest_alone_s, prediction
from potluck.spec.config import MOST_GUESTS
from potluck.spec.fleet import POTLUCK, Fleet, FleetMachine, Job, Prediction
from potluck.units import seconds_text

HANDLING_S = 0.06
"""Time of every lease that no computing hides: decoding the first piece before the forward; encoding, sending,
decoding and adding the last one after the backward. Measured in the lab, on two cores that four machines share."""
AT_ONCE = 4
"""This share of the guests that cannot help (at least one) is left out before the shares are computed again."""
HUB_BYTES_PER_S = 0.55e9
"""Rate of the encrypted transport of one host in each direction, whatever its link (`bench/wire.py`)."""


def way_s(job: Job, host: FleetMachine, guest: FleetMachine, users: int) -> float:
    """W: time of a coded message between a guest and the host, while this many guests use the host's link."""
    if guest.is_beside(host):
        return codec_bytes(job.codec) * job.parameters * users / HUB_BYTES_PER_S
    own = guest.bytes_per_s / guest.node_devices
    rate = shared_nic_bytes_per_s(own, min(host.bytes_per_s, HUB_BYTES_PER_S), users)
    return codec_bytes(job.codec) * job.parameters / rate + host.latency_s + guest.latency_s


def speed_of(job: Job, host: FleetMachine, guest: FleetMachine, users: int) -> Speed:
    """The guest's speed as the quotas use it."""
    return Speed(
        rate_samples_per_s=guest.samples_per_s,
        overhead_s=HANDLING_S + 2 * (host.latency_s + guest.latency_s),
        transfer_s=way_s(job, host, guest, users),
        usual=guest.micro_batch,
        most=max(guest.micro_batch, guest.largest_micro_batch),
    )


def codecs_of(job: Job, fleet: Fleet, speeds: Mapping[str, Speed]) -> dict[str, Choice]:
    """With codec auto, the codec that the host would choose for each guest, the one with the longest transfer
    first."""
    if job.codec != AUTO:
        return {}
    coding_s, now = CODING_S_PER_PARAMETER * job.parameters, dict(speeds)
    found = {}
    for name in sorted(speeds, key=lambda n: -speeds[n].transfer_s):
        found[name] = choose(job.batch, fleet.host.samples_per_s, now, name, coding_s=coding_s)
        if found[name].codec == THIN:
            now[name] = thinner(speeds[name], coding_s)
    return found


def with_codecs(job: Job, fleet: Fleet, speeds: Mapping[str, Speed]) -> dict[str, Speed]:
    """The speeds, with the codecs that the host would choose."""
    coding_s, chosen = CODING_S_PER_PARAMETER * job.parameters, codecs_of(job, fleet, speeds)
    thin = {name for name, choice in chosen.items() if choice.codec == THIN}
    return {n: thinner(s, coding_s) if n in thin else s for n, s in speeds.items()}


def shares_of(job: Job, fleet: Fleet) -> tuple[Quotas, dict[str, Speed]]:
    """The samples of each machine, and the speeds of the guests that help."""
    helping: Sequence[FleetMachine] = sorted(fleet.guests, key=lambda g: -g.samples_per_s)[:MOST_GUESTS]
    while True:
        speeds = {g.name: speed_of(job, fleet.host, g, len(helping)) for g in helping}
        speeds = with_codecs(job, fleet, speeds)
        found = quotas(job.batch, fleet.host.samples_per_s, speeds, host_keeps=1)
        if len(found.guests) == len(helping):
            return found, speeds
        # Not all at once: without some, the others have more of the host's link and can help after all.
        out = sorted(
            (g for g in helping if g.name not in found.guests), key=lambda g: (g.samples_per_s, g.bytes_per_s)
        )
        gone = {g.name for g in out[: max(1, len(out) // AT_ONCE)]}
        helping = [g for g in helping if g.name not in gone]


def potluck(job: Job, fleet: Fleet, *, in_words: bool = True) -> Prediction:
    """The prediction for a host and its guests. Without `in_words` it has no `waits`, and takes half the time."""
    found, speeds = shares_of(job, fleet)
    shares = {fleet.host.name: found.host, **{g.name: found.guests.get(g.name, 0) for g in fleet.guests}}
    unhidden_s = max((speeds[name].unhidden_s(count) for name, count in found.guests.items()), default=0.0)
    row = prediction(
        job,
        fleet,
        strategy=POTLUCK,
        step_s=max(found.step_s, found.host * fleet.host.sample_s) + fleet.host.update_s,
        wire=(2 * max((s.transfer_s for s in speeds.values()), default=0.0), unhidden_s),
        shares=shares,
    )
    if not in_words:
        return row
    plain = {g.name: speed_of(job, fleet.host, g, max(1, len(found.guests))) for g in fleet.guests}
    chosen = codecs_of(job, fleet, {name: plain[name] for name in found.guests})
    return _with_words(fleet, row, chosen)


def _with_words(fleet: Fleet, row: Prediction, chosen: Mapping[str, Choice]) -> Prediction:
    host_waits_s = row.idle_s[fleet.host.name] - fleet.host.update_s
    parts = [
        f"the host waits {seconds_text(host_waits_s)}" if host_waits_s > WAIT_WORTH_S else "the host never waits"
    ]
    out = [g.name for g in fleet.guests if not row.shares[g.name]]
    helping = [g for g in fleet.guests if row.shares[g.name]]
    if helping and row.exposed_s > WAIT_WORTH_S:
        parts.append(f"guests wait up to {seconds_text(row.exposed_s)} for the wire")
    if out:
        parts.append(f"{', '.join(out) if len(out) < 4 else f'{len(out)} guests'} sit{'s' * (len(out) == 1)} out")
    thin = {name: choice for name, choice in chosen.items() if choice.codec == THIN}
    for name, choice in (thin if len(thin) == 1 else chosen if len(chosen) == 1 else {}).items():
        parts.append(f"{name} uses codec {choice.codec} ({choice.reason})")
    if len(thin) > 1:
        parts.append(f"{len(thin)} guests use codec {THIN}: their links are the bottleneck")
    if 0 < len(thin) < len(chosen):
        parts.append(f"the others {INT4}")
    elif len(chosen) > 1 and not thin:
        parts.append(f"all guests use codec {INT4}: {THIN} would make steps hardly faster")
    return replace(row, waits=", ".join(parts))


def least_batch(job: Job, fleet: Fleet, guest: FleetMachine) -> int:
    """Samples per step from which both transfers of a guest fit into a step of host and guest: B ≥ 2·W·(r_h + r_i).

    With F FLOP/s, BW bytes/s and b bytes a parameter the model's size cancels: b·F/(3·BW) tokens.
    """
    rates = fleet.host.samples_per_s + guest.samples_per_s
    return math.ceil(2 * way_s(job, fleet.host, guest, 1) * rates)


def ideal_speedup(job: Job, fleet: Fleet) -> float:
    """The speed-up if every machine computed all the time."""
    return math.fsum(fastest_alone_s(job, fleet) / alone_s(job, m) for m in fleet.machines)
