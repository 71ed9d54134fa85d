"""How many samples each guest gets: as many as it can compute and deliver before the host is done with the rest.

PURE.

The cost model. In a step of B samples the host computes at rate r_h; guest i computes q_i samples at rate r_i and
spends o_i seconds fetching the weights' change and delivering its gradient, as far as that is not hidden behind its
computing. All machines finish at the same time T when

    T = (B + Σ r_i·o_i) / (r_h + Σ r_i)        q_i = r_i·(T − o_i)

How much is hidden depends on how the lease is cut. The change of the weights takes R seconds to arrive, during the
forward (a third) of the first micro-batch of n samples. The gradient takes S seconds to send, during the backward
(two thirds) of the last micro-batch of m samples. At s seconds a sample,

    o = fixed + max(0, R − n·s/3) + max(0, S − 2·m·s/3)

so on a slow link the first and the last micro-batch are large. A lease with too few samples for both is one
micro-batch, both first and last. If that is too large for the guest, it is two, and the last one is filled first,
because its samples hide twice as much. A lease of more samples never takes less time, so `Speed.quota` is the
inverse of `Speed.lease_s`, and T is the time at which the quotas of the host and all guests sum to B.

A guest with q_i < 1 cannot help: it sits out, and T is solved again without it. Samples are whole, so the q_i are
rounded to the neighbours that give the smallest max(host's, every guest's time).

Where a model normalises over the batch (`Least`), a guest whose quota is below the smallest lease sits out as well,
and no micro-batch is cut to a single sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HALVINGS = 100
CLOSE = 1e-12
"""Relative precision of the step time."""
ABSURD = 1e12
"""Larger rates and durations are not real measurements, and their products could overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The fewest samples that a model can train on at once; 1 unless it has batch statistics."""

    micro_batch: int = 1
    """The smallest micro-batch: one sample has no variance."""
    lease: int = 1
    """The smallest lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A guest's speed: samples per second while computing, and the fixed costs of a step."""

    rate_samples_per_s: float
    overhead_s: float
    """Time per step that no computing hides."""
    transfer_s: float = 0.0
    """Time to send a coded message over its link, each way."""
    usual: int = 1
    """Its micro-batch if there is no transfer to hide."""
    most: int = 1
    """The largest micro-batch that it can compute."""
    least: Least = Least()

    @property
    def sample_s(self) -> float:
        return 1 / self.rate_samples_per_s

    @property
    def first(self) -> int:
        """Samples whose forward takes as long as receiving the weights' change, or the most that it can compute."""
        return self._enough(3 * self.transfer_s)

    @property
    def last(self) -> int:
        """Samples whose backward takes as long as sending the gradient, or the most that it can compute."""
        return self._enough(1.5 * self.transfer_s)

    def _enough(self, seconds: float) -> int:
        return math.ceil(max(0.0, min(seconds * self.rate_samples_per_s, self.most)))

    def unhidden_s(self, count: float) -> float:
        """Time of both transfers that a lease of this many samples does not hide."""
        first: float = self.first
        last: float = self.last
        if count < first + last:
            first, last = (count, count) if count <= self.most else (count - last, last)
        down_s = self.transfer_s - first * self.sample_s / 3
        up_s = self.transfer_s - 2 * last * self.sample_s / 3
        return max(0.0, down_s) + max(0.0, up_s)

    def lease_s(self, count: int) -> float:
        """Time from the start of the step to the arrival of the contribution."""
        return count * self.sample_s + self.unhidden_s(count) + self.overhead_s if count else 0.0

    def quota(self, step_s: float) -> float:
        """The largest (real) number of samples that can be delivered within a step of this duration."""
        return self.quota_by_step()(step_s)

    def quota_by_step(self) -> Callable[[float], float]:
        """`quota` as a function that computes what does not depend on the step only once, because a search calls it
        40 times."""
        overhead_s, way_s, sample_s, most = self.overhead_s, self.transfer_s, self.sample_s, self.most
        first, last = self.first, self.last
        down_s = max(0.0, way_s - first * sample_s / 3)
        up_s = max(0.0, way_s - 2 * last * sample_s / 3)
        backward_s, both = last * sample_s / 3, first + last

        def quota(step_s: float) -> float:
            left_s = step_s - overhead_s
            if left_s < 2 * way_s:
                return 0.0  # a single sample would take this long, however fast it is computed
            # As many as hide what can be hidden, or more: what is not hidden is the same for every count.
            long = (left_s - up_s - down_s) / sample_s
            if long >= both:
                return long
            # Two micro-batches: the last hides what it can, each sample of the first hides a third of itself.
            two = min(left_s - up_s, 1.5 * (left_s - up_s - way_s - backward_s)) / sample_s
            if two >= most + 1:
                return two
            # One: bound by its own length, or by the way in and its backward.
            return min(min(left_s, 1.5 * (left_s - way_s)) / sample_s, most)

        return quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The shares of one step and the time it should take."""

    host: int
    guests: dict[str, int]
    step_s: float


def ideal(batch: int, host_rate: float, guests: Mapping[str, Speed]) -> tuple[float, dict[str, float]]:
    """The real-valued solution: the step's time and each helping guest's quota."""
    helping = {name: speed for name, speed in guests.items() if _is_measured(speed)}
    while True:
        step_s = _step_s(batch, host_rate, list(helping.values()))
        quota = {n: s.quota(step_s) for n, s in helping.items()}
        short = {n: q for n, q in quota.items() if q < helping[n].least.lease}
        if not short:
            return step_s, quota
        # Whoever has a part of a sample lengthens the step by going, and may so let somebody in who has none yet.
        parts = {n: q for n, q in short.items() if q > 0}
        for name in [min(parts, key=lambda n: parts[n])] if parts else short:
            del helping[name]


def _is_measured(speed: Speed) -> bool:
    rate = speed.rate_samples_per_s
    return 1 / ABSURD < rate < ABSURD and speed.overhead_s < ABSURD and speed.transfer_s < ABSURD


def _step_s(batch: int, host_rate: float, guests: Sequence[Speed]) -> float:
    """The time in which host and guests together compute the batch."""
    if all(not s.transfer_s for s in guests):
        rate = host_rate + sum(s.rate_samples_per_s for s in guests)
        step_s = (batch + sum(s.rate_samples_per_s * s.overhead_s for s in guests)) / rate
        if all(s.overhead_s <= step_s for s in guests):
            return step_s
    # The host alone, or any guest alone, would be done by then.
    least_s, most_s = 0.0, min([batch / host_rate, *(2 * s.lease_s(batch) for s in guests)])
    quotas_by_step = [s.quota_by_step() for s in guests]
    for _ in range(HALVINGS):
        step_s = (least_s + most_s) / 2
        if host_rate * step_s + sum([quota(step_s) for quota in quotas_by_step]) < batch:
            least_s = step_s
        else:
            most_s = step_s
        if most_s - least_s <= CLOSE * most_s:
            break
    return most_s


def quotas(batch: int, host_rate: float, guests: Mapping[str, Speed], host_keeps: int = 0) -> Quotas:
    """Whole samples for everyone; they sum to `batch`, none is negative, the host keeps at least `host_keeps`."""
    if host_rate <= 0:
        return Quotas(host=batch, guests={}, step_s=math.inf)
    _, wanted = ideal(batch, host_rate, guests)
    shares = {name: math.floor(q) for name, q in wanted.items()}
    for name in sorted(shares, key=lambda n: shares[n]):
        surplus = sum(shares.values()) - (batch - host_keeps)
        shares[name] -= max(0, min(shares[name], surplus))

    def span(trial: Mapping[str, int]) -> float:
        host_s = (batch - sum(trial.values())) / host_rate
        return max([host_s, *(guests[name].lease_s(count) for name, count in trial.items())])

    best = span(shares)
    dealt = sum(shares.values())
    longest_s = max((guests[name].lease_s(count) for name, count in shares.items()), default=0.0)
    with_one_more_s = {name: guests[name].lease_s(count + 1) for name, count in shares.items()}
    while shares and dealt < batch - host_keeps:
        # The next sample goes to the machine that would finish it first: no other order ends sooner.
        name = min(with_one_more_s, key=with_one_more_s.__getitem__)
        longest_s = max(longest_s, with_one_more_s[name])
        now = max((batch - dealt - 1) / host_rate, longest_s)
        if now >= best:
            break
        shares[name], dealt, best = shares[name] + 1, dealt + 1, now
        with_one_more_s[name] = guests[name].lease_s(shares[name] + 1)
    # On a thin link a guest needs as long for a few samples as for many: it gets no more than make a difference.
    if shares and math.isfinite(best):
        name = max(shares, key=lambda n: guests[n].lease_s(shares[n]))
        room = math.floor(best * host_rate) - (batch - sum(shares.values()))
        shares[name] -= max(0, min(room, shares[name] - guests[name].least.lease))
    shares = {name: n for name, n in shares.items() if n >= guests[name].least.lease}
    return Quotas(host=batch - sum(shares.values()), guests=shares, step_s=span(shares))


def lease_sizes(count: int, speed: Speed) -> tuple[int, ...]:
    """A lease cut into micro-batches, the first and the last large enough to hide the transfers."""
    least = speed.least.micro_batch
    usual = max(least, min(speed.usual, speed.most))
    first, last = speed.first, speed.last
    even = split_evenly(count, usual, least)
    if not even or (even[0] >= first and even[-1] >= last):
        return even
    long_first, long_last = max(first, usual), max(last, usual)
    if long_first + long_last <= count:
        between = count - long_first - long_last
        if 0 < between < least:
            return (long_first + between, long_last)
        return (long_first, *split_evenly(between, usual, least), long_last)
    if count <= speed.most:
        return (count,)
    first = max(least, min(speed.most, count - max(last, least)))
    return (first, count - first)


def split_evenly(count: int, largest: int, least: int = 1) -> tuple[int, ...]:
    """`count` samples in as few micro-batches of at most `largest` as possible, as equal as possible.

    None has fewer than `least` samples: with an odd number and pairs, three samples are computed together.
    """
    if count <= 0:
        return ()
    parts = min(-(-count // max(1, largest)), max(1, count // least))
    small, extra = divmod(count, parts)
    return tuple(small + (i < extra) for i in range(parts))


def next_size(left: int, most: int, least: int = 1) -> int:
    """The host's next micro-batch where `left` samples are still to be computed, at most `most` at a time.

    Full micro-batches as far as possible: a GPU may be a percent slower on 61 samples than on the 64 that fill it.
    The remainder comes first, so that the last micro-batch is long and hides the preparation of the next step. A
    remainder of less than half a micro-batch is split evenly with a full one, because a GPU would be idle between a
    short one and the next. Never takes or leaves fewer than `least` samples (2 if one has no variance).
    """
    most = max(1, least, most)
    rest = left % most
    if left <= most or not rest:
        return min(left, most)
    if left < most + least and left < 2 * least:
        return left
    size = rest if 2 * rest >= most else -(-(most + rest) // 2)
    return size if size >= least and not 0 < left - size < least else most


def next_made(left: int, made: int) -> int:
    """The size of a micro-batch that is collated already, or 0 where the host should take another.

    Where it leaves less than half of its size, what is left is cut anew: see `next_size`.
    """
    return made if made == left or 2 * (left - made) >= made else 0


def takeable(left: int, wanted: int, least: int = 1) -> int:
    """About `wanted` of the `left` samples in the pool; never takes or leaves fewer than `least`."""
    size = min(left, max(wanted, least))
    if 0 < left - size < least:
        size = left - least if left >= 2 * least else left
    return size
