"""How many samples each guest gets: as many as it can compute and deliver before the host is done with the rest.

PURE: numbers in, numbers out. It knows no machine beyond its speed.

The cost model. In a step of B samples the host computes at rate r_h; guest i computes q_i samples at rate r_i
and spends o_i seconds fetching the weights' change and delivering its gradient, as far as that is not hidden
behind its computing. All are done at the same time T when

    T = (B + Σ r_i·o_i) / (r_h + Σ r_i)        q_i = r_i·(T − o_i)

A guest with q_i < 1 cannot help: it sits out, and T is solved again without it. Samples are whole, so the q_i
are rounded to the neighbours that give the smallest max(host's time, every guest's time).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

ABSURD = 1e12
"""Rates and overheads from here on are no measurements, and their products would not be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a guest can do: samples a second while computing, and seconds a step that computing cannot hide."""

    rate_samples_per_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The shares of one step and the time it should take."""

    host: int
    guests: dict[str, int]
    step_s: float


def ideal(batch: int, host_rate: float, guests: Mapping[str, Speed]) -> tuple[float, dict[str, float]]:
    """The real-valued solution: the step's time and each helping guest's quota."""
    helping = {n: s for n, s in guests.items() if 0 < s.rate_samples_per_s < ABSURD and s.overhead_s < ABSURD}
    while True:
        rate = host_rate + sum(s.rate_samples_per_s for s in helping.values())
        work = batch + sum(s.rate_samples_per_s * s.overhead_s for s in helping.values())
        step_s = work / rate
        quota = {n: s.rate_samples_per_s * (step_s - s.overhead_s) for n, s in helping.items()}
        if not quota:
            return step_s, {}
        worst = min(quota, key=lambda n: quota[n])
        if quota[worst] >= 1:
            return step_s, quota
        del helping[worst]


def quotas(batch: int, host_rate: float, guests: Mapping[str, Speed], host_keeps: int = 0) -> Quotas:
    """Whole samples for everyone; they sum to `batch`, none is negative, the host keeps at least `host_keeps`."""
    if host_rate <= 0:
        return Quotas(host=batch, guests={}, step_s=math.inf)
    _, wanted = ideal(batch, host_rate, guests)
    shares = {name: math.floor(q) for name, q in wanted.items()}
    for name in sorted(shares, key=lambda n: shares[n]):
        surplus = sum(shares.values()) - (batch - host_keeps)
        shares[name] -= max(0, min(shares[name], surplus))

    def guest_s(name: str, count: int) -> float:
        return count / guests[name].rate_samples_per_s + guests[name].overhead_s if count else 0.0

    def span(trial: Mapping[str, int]) -> float:
        host_s = (batch - sum(trial.values())) / host_rate
        return max([host_s, *(guest_s(name, count) for name, count in trial.items())])

    best = span(shares)
    while shares and sum(shares.values()) < batch - host_keeps:
        # The next sample goes to whoever would be done with it first: then no other order ends sooner.
        name = min(shares, key=lambda n: guest_s(n, shares[n] + 1))
        trial = {**shares, name: shares[name] + 1}
        if span(trial) >= best:
            break
        shares, best = trial, span(trial)
    shares = {name: n for name, n in shares.items() if n > 0}
    return Quotas(host=batch - sum(shares.values()), guests=shares, step_s=span(shares))


def split_evenly(count: int, largest: int) -> tuple[int, ...]:
    """`count` samples in as few micro-batches of at most `largest` as possible, as equal as possible."""
    if count <= 0:
        return ()
    parts = -(-count // max(1, largest))
    small, extra = divmod(count, parts)
    return tuple(small + (i < extra) for i in range(parts))


@dataclass(slots=True)
class Estimate:
    """A running mean that follows changes quickly, with its spread (mean absolute deviation)."""

    value: float | None = None
    spread: float = 0.0
    weight: float = 0.4
    """How much the newest measurement counts."""

    def add(self, measured: float) -> None:
        if not math.isfinite(measured):
            return
        if self.value is None:
            self.value = measured
            return
        self.spread += self.weight * (abs(measured - self.value) - self.spread)
        self.value += self.weight * (measured - self.value)
