"""The verdict of a plan, and the levers, the most useful first.

PURE. Each lever is the same cost model evaluated again with one change; none is a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from potluck.balance.codecs import AUTO, codec_bytes
from potluck.plan import links
from potluck.plan.hub import ideal_speedup, least_batch, potluck
from potluck.plan.predict import WORTH, check_strategies, fastest, predict
from potluck.plan.rank_strategies import fastest_alone_s
from potluck.spec.fleet import (
    DDP,
    DDP_BALANCED,
    DDP_BF16,
    DDP_INT8,
    DDP_OVERLAP,
    FSDP,
    POTLUCK,
    ZERO,
    Fleet,
    FleetMachine,
    Job,
    Lever,
    Plan,
    Prediction,
)

NOTHING_TO_SHARE = (
    'one machine has nothing to share with. Add a second: --machine "mac=M2,link=1GbE", or --facts with the file '
    "of `potluck probe` there"
)
LEVER_WORTH = 1.005
RUNGS = 2
"""How many faster links are tried for each machine."""
MOST_LEVERS = 7
CODECS = ("int8", "int4", "thin", "topk:0.01")
BATCHES = (2, 4)
MOST_TRIED = 16
"""How many machines are tried one by one; of a larger fleet, the first."""


def plan(job: Job, fleet: Fleet, strategies: Sequence[str] = (), assumptions: Sequence[str] = ()) -> Plan:
    """The predictions of all strategies, a verdict and the levers."""
    rows = tuple(predict(job, fleet, name) for name in check_strategies(tuple(strategies)))
    ours = next((row for row in rows if row.strategy == POTLUCK), None) or potluck(job, fleet)
    found = levers(job, fleet, ours)
    other = _much_faster(rows, ours)
    if other is not None:  # what makes potluck faster, and still slower than that, is no help
        found = tuple(lever for lever in found if lever.speedup > other.speedup)
    return Plan(
        job=job,
        fleet=fleet,
        rows=rows,
        ideal_speedup=ideal_speedup(job, fleet),
        verdict=verdict(job, fleet, rows, ours, found),
        levers=found,
        assumptions=tuple(assumptions),
    )


# -- levers ---------------------------------------------------------------------------------------------


def levers(job: Job, fleet: Fleet, now: Prediction, tried: int = MOST_TRIED) -> tuple[Lever, ...]:
    """Changes that make a step shorter, the best first; those that gain less than half a percent are left out.

    `tried`: how many machines are tried one by one.
    """
    if not fleet.guests:
        return ()
    base_s = fastest_alone_s(job, fleet)
    found = []
    for what, other_job, other_fleet in _changes(job, fleet, tried):
        row = potluck(other_job, other_fleet, in_words=False)
        # Against the same fastest machine: leaving it out would otherwise look like a gain.
        alone_s = base_s if other_job.batch == job.batch else fastest_alone_s(other_job, fleet)
        speedup = alone_s / row.step_s
        if speedup / now.speedup > LEVER_WORTH and row.fits:
            same = other_job.batch == job.batch and not what.startswith("codec topk")
            found.append(Lever(what=what, speedup=speedup, gain=speedup / now.speedup, same_training=same))
    # Of changes that bring about the same, the first named is the simplest.
    return tuple(sorted(found, key=lambda lever: -round(lever.gain, 2))[:MOST_LEVERS])


def _changes(job: Job, fleet: Fleet, tried: int) -> Iterator[tuple[str, Job, Fleet]]:
    host = fleet.host
    for name in (g.name for g in fleet.guests[:tried]):
        if len(fleet.guests) > 1:
            yield f"leave {name} out", job, fleet.without(name)
    by_speed = sorted(fleet.guests, key=lambda g: -g.samples_per_s)
    for count in (2**i for i in range(1, 12) if 2**i < len(fleet.guests)):
        yield f"only the {count} fastest guests", job, Fleet(machines=(host, *by_speed[:count]))
    fastest = max(fleet.machines, key=lambda m: m.samples_per_s)
    if fastest is not host:
        yield f"make {fastest.name} the host", job, fleet.hosted_by(fastest.name)
    yield from _links(job, fleet, tried)
    for codec in CODECS:
        left_open = job.codec == AUTO and not codec.startswith("topk")
        if codec_bytes(codec) < codec_bytes(job.codec) and not left_open:
            coarser = " (coarser: watch the loss)" if codec.startswith("topk") else ""
            yield f"codec {codec}{coarser}", replace(job, codec=codec), fleet
    for times in BATCHES:
        yield f"a batch {times} times as large ({_batch(job, times)})", job.with_batch(times * job.batch), fleet


def _links(job: Job, fleet: Fleet, tried: int) -> Iterator[tuple[str, Job, Fleet]]:
    """The next faster links of each guest, with the host's where that is slower; the next one for all at once."""
    for guest in fleet.guests[:tried]:
        link = links.faster(min(guest.bytes_per_s, fleet.host.bytes_per_s))
        for _ in range(RUNGS):
            if link is not None:
                yield f"{link.name} for {_whose(fleet, guest, link)}", job, _both_linked(fleet, guest, link)
                link = links.faster(link.bytes_per_s)
    faster_all = fleet
    for guest in fleet.guests:
        link = links.faster(min(guest.bytes_per_s, fleet.host.bytes_per_s))
        faster_all = faster_all if link is None else _both_linked(faster_all, guest, link)
    if len(fleet.guests) > 1 and faster_all is not fleet:
        yield "the next faster link for all machines", job, faster_all


def _whose(fleet: Fleet, guest: FleetMachine, link: links.LinkSheet) -> str:
    """Which of the two machines need the new link."""
    slower = [m.name for m in (fleet.host, guest) if m.bytes_per_s < link.bytes_per_s]
    return " and ".join(slower)


def _both_linked(fleet: Fleet, guest: FleetMachine, link: links.LinkSheet) -> Fleet:
    return _linked(_linked(fleet, fleet.host, link), guest, link)


def _linked(fleet: Fleet, machine: FleetMachine, link: links.LinkSheet) -> Fleet:
    if machine.bytes_per_s >= link.bytes_per_s:
        return fleet
    return fleet.changed(
        machine.name, link_bytes_per_s=link.bytes_per_s, latency_s=link.latency_s / 2, link=link.name
    )


def _batch(job: Job, times: int) -> str:
    samples = times * job.batch
    return f"{samples * job.tokens_per_sample:,} tokens" if job.tokens_per_sample > 1 else f"{samples:,} samples"


# -- the verdict ----------------------------------------------------------------------------------------


def verdict(job: Job, fleet: Fleet, rows: Sequence[Prediction], ours: Prediction, found: Sequence[Lever]) -> str:
    """Whether it is worth it, in one or two sentences."""
    if not fleet.guests:
        return NOTHING_TO_SHARE
    helping = [g.name for g in fleet.guests if ours.shares[g.name]]
    other = _much_faster(rows, ours)
    if other is not None:
        return f"use {other.strategy}: {other.speedup:.2f}×; potluck would reach {ours.speedup:.2f}×."
    text = _worth(fleet, ours, helping, found)
    balanced = next((row for row in rows if row.strategy == DDP_BALANCED), None)
    if ours.speedup >= WORTH and balanced is not None and balanced.speedup < 1:
        text += f". With DDP, even balanced by hand, it would be slower than alone: {balanced.speedup:.2f}×"
        text += _packed(rows, balanced)
    if not ours.fits:
        text += f". But it {ours.note}"
    thin = [g for g in fleet.guests if least_batch(job, fleet, g) > job.batch]
    if thin and ours.speedup < WORTH:
        need = max(least_batch(job, fleet, g) for g in thin) * job.tokens_per_sample
        unit = "tokens" if job.tokens_per_sample > 1 else "samples"
        text += f". To hide the link a step needs about {need:,} {unit}"
    return text + "."


def _much_faster(rows: Sequence[Prediction], ours: Prediction) -> Prediction | None:
    """The fastest other strategy of the same training, if it is worth more than potluck."""
    same = [row for row in rows if row.strategy in (DDP, DDP_BALANCED, DDP_OVERLAP, ZERO, FSDP) and row.fits]
    best = fastest(same or [ours])
    return best if best.speedup > WORTH * max(1.0, ours.speedup) else None


def _packed(rows: Sequence[Prediction], balanced: Prediction) -> str:
    """The best DDP variant, if that is not the balanced one."""
    near = [row for row in rows if row.strategy in (DDP_OVERLAP, DDP_BF16, DDP_INT8) and row.fits]
    best = max(near, key=lambda row: row.speedup, default=balanced)
    return (
        f"; the best of its variants, {best.strategy}: {best.speedup:.2f}×"
        if best.speedup > balanced.speedup
        else ""
    )


def _worth(fleet: Fleet, ours: Prediction, helping: Sequence[str], found: Sequence[Lever]) -> str:
    if ours.speedup >= WORTH:
        text = f"bring {_names(helping)}: {ours.speedup:.2f}×"
        out = [g.name for g in fleet.guests if g.name not in helping]
        return text + (f"; {_names(out)} cannot help and will sit out" if out else "")
    text = f"do not bother: {ours.speedup:.2f}×"
    worth = [lever for lever in found if lever.speedup >= WORTH]
    best = next((lever for lever in worth if lever.same_training), worth[0] if worth else None)
    return text + (f"; {best.what} makes it {best.speedup:.2f}×" if best is not None else "")


def _names(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{len(names)} guests"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
