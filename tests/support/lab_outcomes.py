"""Outcomes of strategies on a pair, made up but not far from what is measured: for tables, plots and their tests.

Times are worked out from the rig's speeds and links by a simple model; nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from potluck.balance.codecs import codec_bytes
from potluck.balance.shares import whole_shares
from potluck.lab.figures import results
from potluck.plan import about
from potluck.spec.outcome import Interval, Outcome, StepDone
from potluck.spec.results import Results
from potluck.spec.rig import Rig

MICRO_BATCH = 2
_GAP_S = 0.002


class Author:
    """Writes one strategy's outcome, step by step."""

    def __init__(self, rig: Rig, strategy: str, began: float = 1000.0) -> None:
        self.rig, self.strategy, self.began, self.now = rig, strategy, began, began
        self.steps: list[StepDone] = []
        self.intervals: list[Interval] = []
        self.host_bytes: list[tuple[float, int]] = [(began, 0)]

    def compute(self, machine: str, start: float, samples: int) -> float:
        """In micro-batches, as devices report it; returns when it is done."""
        seconds = self.rig.machine(machine).seconds_per_sample_at(len(self.steps) + 1)
        assert seconds is not None
        while samples > 0:
            now = min(MICRO_BATCH, samples)
            end = start + now * seconds
            self.add(machine, "compute", start, end - _GAP_S)
            start, samples = end, samples - now
        return start

    def add(self, machine: str, kind: str, start: float, end: float) -> None:
        # The meter looks every 25 ms, so that a transfer comes in many short intervals.
        piece = 0.025 if kind != "compute" else math.inf
        while start < end:
            until = min(start + piece, end)
            self.intervals.append(Interval(machine=machine, kind=kind, start=start, end=until))
            start = until

    def end_step(self, at: float, samples: Mapping[str, int], wire_bytes: int, present: Sequence[str]) -> None:
        number = len(self.steps) + 1
        loss = 1.9 + 3.7 * math.exp(-number / 4.5) + 0.03 * math.sin(number * 1.7)
        self.steps.append(
            StepDone(
                step=number,
                ended_at=at,
                step_s=at - self.now,
                loss=loss,
                samples=dict(samples),
                present=tuple(present),
            )
        )
        self.host_bytes.append((at, self.host_bytes[-1][1] + wire_bytes))
        self.now = at

    def outcome(self, note: str = "") -> Outcome:
        return Outcome(
            strategy=self.strategy,
            started_at=self.began,
            steps=self.steps,
            intervals=self.intervals,
            host_bytes=self.host_bytes if self.strategy != "solo" else [],
            note=note,
        )


def solo(rig: Rig) -> Outcome:
    author = Author(rig, "solo")
    host = rig.host.name
    for _ in range(rig.workload.steps):
        done = author.compute(host, author.now, rig.workload.global_batch)
        author.end_step(done + 0.02, {host: rig.workload.global_batch}, 0, [host])
    return author.outcome()


def ddp(rig: Rig, strategy: str = "ddp", shares: Mapping[str, int] | None = None) -> Outcome:
    """Everybody computes, then a ring all-reduce of fp32 at the slowest link; a third of it behind the backward."""
    author = Author(rig, strategy)
    names = [m.name for m in rig.machines]
    even = dict.fromkeys(names, rig.workload.global_batch // len(names))
    shares = shares or even
    size = about.gradient_bytes(rig.workload)
    rate = min(about.link_mbit(rig, m) or 1000 for m in rig.guests)
    reduce_s = 2 * (len(names) - 1) / len(names) * size * 8 / (rate * 1e6)
    for _ in range(rig.workload.steps):
        ready = max(author.compute(name, author.now, shares[name]) for name in names)
        start = ready - reduce_s / 3
        for name in names:
            author.add(name, "send", start, start + reduce_s)
            author.add(name, "receive", start, start + reduce_s)
        author.end_step(start + reduce_s + 0.02, shares, 2 * size, names)
    return author.outcome()


def potluck(rig: Rig) -> Outcome:
    """The host computes all the time; guests receive while they begin and send while they end."""
    author = Author(rig, "potluck")
    size = round(about.parameters(rig.workload) * codec_bytes(rig.workload.codec))
    for _ in range(rig.workload.steps):
        step = len(author.steps) + 1
        present = [m.name for m in rig.machines if m.present_at(step)]
        seconds = [rig.machine(n).seconds_per_sample_at(step) or 1.0 for n in present]
        shares = dict(zip(present, whole_shares(rig.workload.global_batch, seconds)))
        start = author.now
        done = author.compute(rig.host.name, start, shares[rig.host.name])
        ends = [done]
        for guest in rig.guests:
            if guest.name not in present:
                continue
            over_s = size * 8 / ((about.link_mbit(rig, guest) or 1000) * 1e6)
            author.add(guest.name, "receive", start, start + over_s)
            author.add(rig.host.name, "send", start, start + over_s)
            ready = author.compute(guest.name, start + 0.3 * over_s, shares[guest.name])
            author.add(guest.name, "send", ready - 0.8 * over_s, ready + 0.2 * over_s)
            author.add(rig.host.name, "receive", ready - 0.8 * over_s, ready + 0.2 * over_s)
            ends.append(ready + 0.2 * over_s)
        author.end_step(max(ends) + 0.03, shares, 2 * size * len(rig.guests), present)
    return author.outcome()


def all_of(rig: Rig) -> tuple[Results, list[Outcome]]:
    """Four strategies and their figures, four steps of warm-up."""
    fact = about.facts(rig)
    assert fact.shares is not None
    assert fact.host_step_s is not None
    outcomes = [solo(rig), ddp(rig), ddp(rig, "ddp-balanced", fact.shares), potluck(rig)]
    alone = {m.name: m.samples_per_s * 0.997 for m in fact.machines if m.samples_per_s is not None}
    return results(rig, outcomes, alone, fact.host_step_s + 0.02, 4, "network namespaces"), outcomes
