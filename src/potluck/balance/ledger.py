"""Tracks which samples belong to a step and which machine has them; every sample is counted exactly once.

PURE.

Positions number the samples of the whole run in the order in which they are dealt. A step owns consecutive
positions, as many as its source gives it. Within a step a position is in exactly one place: in the pool, with the
host, in a lease, or counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from potluck.errors import ConfigError

Order = Callable[[int], Sequence[int]]
"""The order of one epoch's samples: a permutation of range(samples)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The samples of one step."""

    first: int
    """The position of the step's first sample."""
    count: int
    keys: Sequence[Any] | None
    """The data set's index of each sample; None for a stream, whose samples have none."""
    epoch: int
    """The epoch of the first sample, from 0."""

    def holds(self, position: int) -> bool:
        return self.first <= position < self.first + self.count


class StepSource(Protocol):
    """Where steps come from."""

    def next_step(self) -> StepSamples | None:
        """The samples of the next step; None if there is none."""

    def peek(self) -> StepSamples | None:
        """The step after the last one given, if it is already known. Changes nothing and never waits."""


class EpochSteps:
    """Steps of `global_batch` samples from a permutation of each epoch. A step may extend into the next epoch."""

    def __init__(self, *, samples: int, global_batch: int, order: Order, step: int = 0) -> None:
        if samples < 1:
            raise ConfigError("the data set is empty", hint="give a data set with at least one sample")
        if global_batch < 1:
            raise ConfigError(f"global_batch must be at least 1, not {global_batch}")
        self.samples, self.global_batch = samples, global_batch
        self._order = order
        self._step = step
        self._epochs: dict[int, Sequence[int]] = {}

    def next_step(self) -> StepSamples:
        samples = self.peek()
        self._step += 1
        return samples

    def peek(self) -> StepSamples:
        first = self._step * self.global_batch
        keys = self.samples_of(range(first, first + self.global_batch))
        return StepSamples(first=first, count=self.global_batch, keys=keys, epoch=first // self.samples)

    def ends_epoch(self, step: StepSamples) -> bool:
        """Whether the last sample of an epoch is among the step's."""
        return (step.first + step.count) // self.samples > step.epoch

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        """The data set's indices of any positions."""
        return [self._sample(p) for p in positions]

    def _sample(self, position: int) -> int:
        epoch = position // self.samples
        if epoch not in self._epochs:
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._order(epoch)
        return int(self._epochs[epoch][position % self.samples])


@dataclass(slots=True, kw_only=True)
class Lease:
    """Positions given to a guest for one step."""

    id: int
    guest: str
    step: int
    positions: tuple[int, ...]


@dataclass(slots=True)
class _DealtStep:
    samples: StepSamples
    pool: deque[int] = field(default_factory=deque)
    with_host: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    by_machine: dict[str, int] = field(default_factory=dict)


class LedgerError(AssertionError):
    """A call breaks the ledger's rules: a bug in Potluck, never a user's mistake."""


class Ledger:
    """Gives out the samples of one step at a time. A step can be closed only when each sample is counted exactly
    once."""

    def __init__(self, source: StepSource, *, step: int = 0) -> None:
        """`step`: the number of the source's next step."""
        self.step = step
        self.source = source
        self._next: StepSamples | None = None
        self._now: _DealtStep | None = None
        self._next_lease = 1

    # -- the step ---------------------------------------------------------------------------------------

    def prepare(self) -> StepSamples | None:
        """The samples of the next step to be opened; None if the source has no more."""
        if self._next is None:
            self._next = self.source.next_step()
        return self._next

    def after(self) -> StepSamples | None:
        """The samples of the step after the open one, if they are known already."""
        return self.source.peek() if self._now is not None and self._next is None else None

    def open_step(self) -> None:
        if self._now is not None:
            raise LedgerError(f"step {self.step} is open already")
        samples = self.prepare()
        if samples is None:
            raise LedgerError(f"there are no samples for step {self.step}")
        self._next = None
        self._now = _DealtStep(samples, pool=deque(range(samples.first, samples.first + samples.count)))

    def close_step(self) -> dict[str, int]:
        """End the step and return the samples counted for each machine. Only a complete step can be closed."""
        now = self._open()
        if len(now.counted) != now.samples.count or now.pool or now.with_host or now.leases:
            raise LedgerError(
                f"step {self.step} has {len(now.counted)} of {now.samples.count} samples counted, "
                f"{len(now.pool)} in the pool, {len(now.with_host)} with the host, {len(now.leases)} leases"
            )
        self._now = None
        self.step += 1
        return now.by_machine

    @property
    def is_open(self) -> bool:
        return self._now is not None

    @property
    def global_batch(self) -> int:
        """The number of samples in the open step."""
        return self._open().samples.count

    @property
    def epoch(self) -> int:
        """The epoch of the open step, from 0."""
        return self._open().samples.epoch

    @property
    def full(self) -> bool:
        return len(self._open().counted) == self.global_batch

    @property
    def in_pool(self) -> int:
        return len(self._open().pool)

    @property
    def front(self) -> int | None:
        """The first position in the pool, which the host takes next."""
        pool = self._open().pool
        return pool[0] if pool else None

    @property
    def leases(self) -> dict[int, Lease]:
        return self._open().leases if self._now is not None else {}

    # -- the host ---------------------------------------------------------------------------------------

    def take(self, count: int) -> tuple[int, ...]:
        """At most `count` positions for the host, out of the pool."""
        now = self._open()
        if count >= len(now.pool):
            taken = tuple(now.pool)
            now.pool.clear()
        else:
            taken = tuple([now.pool.popleft() for _ in range(count)])
        now.with_host.update(taken)
        return taken

    def host_counts(self, positions: Sequence[int], machine: str) -> None:
        now = self._open()
        if not now.with_host.issuperset(positions):
            raise LedgerError("the host counts positions that it does not hold")
        now.with_host.difference_update(positions)
        self._count(positions, machine)

    # -- the guests -------------------------------------------------------------------------------------

    def lease(
        self, guest: str, count: int, *, wanted: Sequence[int | None] = (), spare: Collection[int] = ()
    ) -> Lease:
        """Give a guest `count` positions from the end of the pool (the host takes them from the front).

        `wanted`: the lease's positions in order; None for any. `spare`: positions that are taken last.
        """
        now = self._open()
        if not 0 < count <= len(now.pool):
            raise LedgerError(f"a lease of {count} from a pool of {len(now.pool)}")
        if wanted or spare:
            positions = self._chosen(wanted or (None,) * count, spare)
            taken = set(positions)
            now.pool = deque(p for p in now.pool if p not in taken)
        else:
            positions = tuple(now.pool.pop() for _ in range(count))[::-1]
        lease = Lease(id=self._next_lease, guest=guest, step=self.step, positions=positions)
        self._next_lease += 1
        now.leases[lease.id] = lease
        return lease

    def _chosen(self, wanted: Sequence[int | None], spare: Collection[int]) -> tuple[int, ...]:
        """`wanted` with positions from the end of the pool where it says None."""
        held = {p for p in wanted if p is not None}
        if not self.are_free(held):
            raise LedgerError("a lease of positions that are not in the pool")
        free = [p for p in self._open().pool if p not in held]
        free = [*(p for p in free if p in spare), *(p for p in free if p not in spare)]
        rest = iter(free[len(free) - wanted.count(None) :])
        return tuple(next(rest) if p is None else p for p in wanted)

    def are_free(self, positions: Collection[int]) -> bool:
        """Whether all these positions are in the pool."""
        return set(positions) <= set(self._open().pool)

    def trim(self, lease_id: int, keep: int) -> int:
        """Keep only the first `keep` samples of a lease and return the others to the pool. Returns how many."""
        lease = self.leases.get(lease_id)
        if lease is None or not 0 < keep < len(lease.positions):
            return 0
        back = lease.positions[keep:]
        lease.positions = lease.positions[:keep]
        self._open().pool.extend(back)
        return len(back)

    def take_back(self, lease_id: int) -> int:
        """End a lease without its contribution and return its samples to the pool. Returns how many."""
        now = self._open() if self._now is not None else None
        lease = now.leases.pop(lease_id, None) if now is not None else None
        if now is None or lease is None:
            return 0
        now.pool.extend(lease.positions)
        return len(lease.positions)

    def deliver(self, lease_id: int, count: int) -> bool:
        """Count a contribution. Returns False and counts nothing if the lease is no longer open or differs."""
        lease = self.leases.get(lease_id)
        if lease is None or len(lease.positions) != count:
            return False
        del self._open().leases[lease_id]
        self._count(lease.positions, lease.guest)
        return True

    # -- samples ----------------------------------------------------------------------------------------

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        """The data set's indices of these positions of the open step."""
        samples = self._open().samples
        if samples.keys is None:
            raise LedgerError("the samples of a stream have no indices")
        if not all(samples.first <= p < samples.first + samples.count for p in positions):
            raise LedgerError(f"positions of another step than {self.step}")
        return [samples.keys[p - samples.first] for p in positions]

    def _count(self, positions: Sequence[int], machine: str) -> None:
        now = self._open()
        if not now.counted.isdisjoint(positions):
            raise LedgerError("a sample would be counted twice")
        now.counted.update(positions)
        now.by_machine[machine] = now.by_machine.get(machine, 0) + len(positions)

    def _open(self) -> _DealtStep:
        if self._now is None:
            raise LedgerError("no step is open")
        return self._now
