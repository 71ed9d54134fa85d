"""Step times of strategies whose machines are ranks of one process group, and of one machine alone.

PURE. `plan/hub.py` predicts potluck itself.

Machine i computes its q_i samples in c_i = q_i/r_i seconds. All exchange S bytes of gradients, which takes C
seconds (`collectives.py`), and then update:

    alone            B/r + u
    DDP              max over i, with what overlaps (`overlapped_end_s`), + max u_i
    ZeRO             the same bytes: a reduce-scatter of gradients (overlapped), u/N, an all-gather of weights (not)
    FSDP             K rounds (micro-batches) of max(computing, 2 all-gathers + 1 reduce-scatter), + u/N

S is 4 bytes a parameter (or as the job says), 2 with bf16, 1 and a scale for every 128 with int8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from potluck.balance import shares
from potluck.balance.codecs import codec_bytes
from potluck.balance.leases import split_evenly
from potluck.plan import collective_costs
from potluck.plan.memory import memory_of, micro_batch_of
from potluck.spec.fleet import (
    DDP,
    DDP_ACCUMULATE,
    DDP_BALANCED,
    DDP_BF16,
    DDP_INT8,
    DDP_OVERLAP,
    FSDP,
    SOLO,
    ZERO,
    Fleet,
    FleetMachine,
    Job,
    Prediction,
)
from potluck.units import seconds_text

RING_PART = 0.93
"""Share of a link's payload rate that remains when both directions are full: the acknowledgements of one direction
wait for the data of the other. Measured in the lab with gloo: 0.87 to 1.0."""
BACKWARD_PART = 2 / 3
"""The backward computes two products for every one of the forward."""
STOCK_BUCKET_BYTES = 25 << 20
SMALL_BUCKET_BYTES = 1 << 20
"""Bucket size of a careful user, so that a small model's gradients overlap at all."""
ACCUMULATED = 4
"""Steps accumulated for each update with ddp-accumulate."""
WAIT_WORTH_S = 0.005
BYTES_OF = {DDP_BF16: 2.0, DDP_INT8: codec_bytes("int8")}


def alone_s(job: Job, machine: FleetMachine) -> float:
    """B/r + u: a step of one machine by itself."""
    return job.batch * machine.sample_s + machine.update_s


def fastest_alone_s(job: Job, fleet: Fleet) -> float:
    return min(alone_s(job, machine) for machine in fleet.machines)


def equal_shares(job: Job, fleet: Fleet) -> dict[str, int]:
    """Equal shares; the first machines get one more if the batch does not divide evenly."""
    return dict(zip((m.name for m in fleet.machines), shares.equal_shares(job.batch, len(fleet.machines))))


def balanced_shares(job: Job, fleet: Fleet) -> dict[str, int]:
    """Shares in proportion to the machines' speeds, in whole samples, at least one each."""
    seconds = [m.sample_s for m in fleet.machines]
    return dict(zip((m.name for m in fleet.machines), shares.whole_shares(job.batch, seconds, least=1)))


def solo(job: Job, fleet: Fleet) -> Prediction:
    """The host alone."""
    host = fleet.host
    step_s = alone_s(job, host)
    others = {m.name: step_s for m in fleet.guests}
    return prediction(
        job,
        fleet,
        strategy=SOLO,
        step_s=step_s,
        wire=(0.0, 0.0),
        shares={host.name: job.batch, **dict.fromkeys(others, 0)},
    )


def ddp(job: Job, fleet: Fleet, strategy: str = DDP, shares: Mapping[str, int] | None = None) -> Prediction:
    """Stock DDP and its variants: equal shares (ddp, ddp-overlap) or balanced ones (all others).

    `shares` stand in for those, where machines' speeds are not what they were when these were set.
    """
    if strategy == DDP_ACCUMULATE:
        return _accumulated(job, fleet)
    if shares is None:
        shares = equal_shares(job, fleet) if strategy in (DDP, DDP_OVERLAP) else balanced_shares(job, fleet)
    size_bytes = min(job.gradient_bytes, job.parameters * BYTES_OF.get(strategy, math.inf))
    exchange_s = ring_s(fleet, size_bytes)
    bucket = STOCK_BUCKET_BYTES if strategy == DDP else SMALL_BUCKET_BYTES
    ends_s = _ends_s(fleet, shares)
    end_s = collective_costs.overlapped_end_s(
        ends_s, _backwards_s(fleet, shares), exchange_s, max(1, round(size_bytes / bucket))
    )
    notes = {
        DDP_BF16: "gradients rounded to bf16",
        DDP_INT8: "gradients rounded to int8, by potluck.dist.compress",
    }
    return prediction(
        job,
        fleet,
        strategy=strategy,
        step_s=end_s + max(m.update_s for m in fleet.machines),
        wire=(exchange_s, end_s - max(ends_s)),
        shares=shares,
        note=notes.get(strategy, ""),
    )


def _accumulated(job: Job, fleet: Fleet) -> Prediction:
    """One exchange for the samples of several steps, in the time of one step's samples."""
    larger = ddp(job.with_batch(ACCUMULATED * job.batch), fleet, DDP_BALANCED)
    return prediction(
        job,
        fleet,
        strategy=DDP_ACCUMULATE,
        step_s=larger.step_s / ACCUMULATED,
        wire=(larger.exchange_s / ACCUMULATED, larger.exposed_s / ACCUMULATED),
        shares={name: round(share / ACCUMULATED) for name, share in larger.shares.items()},
        note=f"an update only every {ACCUMULATED} steps' samples: another training",
    )


def zero(job: Job, fleet: Fleet) -> Prediction:
    """ZeRO-2: gradients are scattered during the backward, weights gathered after the update; balanced shares."""
    shares = balanced_shares(job, fleet)
    half_s = ring_s(fleet, job.gradient_bytes) / 2
    ends_s = _ends_s(fleet, shares)
    pieces = max(1, round(job.gradient_bytes / STOCK_BUCKET_BYTES))
    end_s = collective_costs.overlapped_end_s(ends_s, _backwards_s(fleet, shares), half_s, pieces)
    update_s = max(m.update_s for m in fleet.machines) / len(fleet.machines)
    return prediction(
        job,
        fleet,
        strategy=ZERO,
        step_s=end_s + update_s + half_s,
        wire=(2 * half_s, end_s - max(ends_s) + half_s),
        shares=shares,
    )


def fsdp(job: Job, fleet: Fleet) -> Prediction:
    """FSDP (ZeRO-3): all ranks in step, each round gathers the weights twice and scatters the gradients once.

    While one layer computes, the next is gathered, so that a round takes max(computing, wire); equal shares.
    """
    shares = equal_shares(job, fleet)
    sizes = {m.name: micro_batch_of(FSDP, job, m, fleet) for m in fleet.machines}
    rounds = max(len(split_evenly(share, sizes[name])) for name, share in shares.items())
    wire_s = 1.5 * ring_s(fleet, job.gradient_bytes)
    compute_s = max(_ends_s(fleet, shares))
    busy_s = max(compute_s, rounds * wire_s)
    update_s = max(m.update_s for m in fleet.machines) / len(fleet.machines)
    return prediction(
        job,
        fleet,
        strategy=FSDP,
        step_s=busy_s + update_s,
        wire=(rounds * wire_s, busy_s - compute_s),
        shares=shares,
        note=f"{rounds} rounds of gathering the weights" if rounds > 1 and len(shares) > 1 else "",
    )


def ring_s(fleet: Fleet, size_bytes: float) -> float:
    """An all-reduce over the fleet: its slowest link with both directions full, and its longest latency.

    Devices of one node exchange inside it first, so that only the nodes are in the ring over the links.
    """
    rate = RING_PART * collective_costs.slowest_link(m.bytes_per_s for m in fleet.machines)
    far = sorted((max(m.latency_s for m in node) for node in fleet.nodes), reverse=True)[:2]
    nodes = [(len(node), _inside_bytes_per_s(node), max(m.intra_latency_s for m in node)) for node in fleet.nodes]
    return collective_costs.two_level_all_reduce_s(size_bytes, nodes, rate, math.fsum(far))


def _inside_bytes_per_s(node: Sequence[FleetMachine]) -> float:
    return collective_costs.slowest_link(m.intra_bytes_per_s for m in node if m.intra_bytes_per_s is not None)


def _ends_s(fleet: Fleet, shares: Mapping[str, int]) -> list[float]:
    return [shares[m.name] * m.sample_s for m in fleet.machines]


def _backwards_s(fleet: Fleet, shares: Mapping[str, int]) -> list[float]:
    """Time of each machine's last micro-batch: only then is the sum of the gradients complete."""
    lasts = [split_evenly(shares[m.name], m.micro_batch)[-1:] for m in fleet.machines]
    return [BACKWARD_PART * sum(last) * m.sample_s for last, m in zip(lasts, fleet.machines)]


def prediction(
    job: Job,
    fleet: Fleet,
    *,
    strategy: str,
    step_s: float,
    wire: tuple[float, float],
    shares: Mapping[str, int],
    note: str = "",
) -> Prediction:
    """The row of a step time; `wire`: seconds that bytes are on it, and those of them that a machine waits for."""
    computing = {m.name: shares[m.name] * m.sample_s for m in fleet.machines}
    memory = memory_of(strategy, job, fleet, shares)
    crowded = [m for m in fleet.machines if m.memory_bytes is not None and memory[m.name] > m.memory_bytes]
    notes = [note] if note else []
    if crowded:
        notes.append(f"does not fit into the memory of {', '.join(m.name for m in crowded)}")
    together = math.fsum(job.batch / alone_s(job, m) for m in fleet.machines)
    return Prediction(
        strategy=strategy,
        step_s=step_s,
        compute_s=max(computing.values()),
        exchange_s=wire[0],
        exposed_s=max(0.0, wire[1]),
        speedup=fastest_alone_s(job, fleet) / step_s,
        efficiency=job.batch / step_s / together,
        shares=dict(shares),
        idle_s={name: max(0.0, step_s - seconds) for name, seconds in computing.items()},
        memory_bytes=memory,
        waits=_waits(strategy, computing, max(0.0, wire[1])),
        note="; ".join(notes),
        fits=not crowded,
    )


def _waits(strategy: str, computing: Mapping[str, float], exposed_s: float) -> str:
    """A sentence that says which machine waits for which."""
    if strategy == SOLO:
        idle = [name for name, seconds in computing.items() if not seconds]
        return f"{_names(idle)} not used" if idle else ""
    slowest = max(computing, key=lambda name: computing[name])
    parts = []
    for name, seconds in sorted(computing.items(), key=lambda item: item[1]):
        if computing[slowest] - seconds > WAIT_WORTH_S:
            parts.append(f"{name} waits {seconds_text(computing[slowest] - seconds)} for {slowest}")
            break
    if exposed_s > WAIT_WORTH_S:
        parts.append(f"all wait {seconds_text(exposed_s)} for the wire")
    return ", ".join(parts)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{len(names)} machines"
