"""Which samples belong to which step, and who has them: every sample of an epoch counted exactly once.

PURE: it is given the order of each epoch and knows no clock, no socket and no tensor.

Positions number the samples of the whole run: position p is sample `order(p // samples)[p % samples]`, and
step s owns the positions s·B … (s+1)·B − 1, whoever computes them. Inside a step a position is in exactly one
place: in the pool, with the host, in a lease, or counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from potluck.errors import ConfigError

Order = Callable[[int], Sequence[int]]
"""The order of one epoch's samples: a permutation of range(samples)."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """Positions handed to a guest for one step."""

    id: int
    guest: str
    step: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """All that a checkpoint needs: the next step continues at the very sample."""

    samples: int
    global_batch: int
    step: int


@dataclass(slots=True)
class _Step:
    pool: deque[int] = field(default_factory=deque)
    with_host: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    by_machine: dict[str, int] = field(default_factory=dict)


class LedgerError(AssertionError):
    """The caller broke the rules of the ledger: a fault of the program, never of a user."""


class Ledger:
    """Deals the samples of one step at a time and refuses to close a step that is not exactly full."""

    def __init__(self, *, samples: int, global_batch: int, order: Order, step: int = 0) -> None:
        if samples < 1:
            raise ConfigError("the data set is empty", hint="give a data set with at least one sample")
        if global_batch < 1:
            raise ConfigError(f"global_batch must be at least 1, not {global_batch}")
        self.samples = samples
        self.global_batch = global_batch
        self.step = step
        self._order = order
        self._epochs: dict[int, Sequence[int]] = {}
        self._now: _Step | None = None
        self._next_lease = 1

    # -- the step ---------------------------------------------------------------------------------------

    def open_step(self) -> None:
        if self._now is not None:
            raise LedgerError(f"step {self.step} is open already")
        first = self.step * self.global_batch
        self._now = _Step(pool=deque(range(first, first + self.global_batch)))

    def close_step(self) -> dict[str, int]:
        """End the step; the samples counted for each machine. Only a full step can be closed."""
        now = self._open()
        if len(now.counted) != self.global_batch or now.pool or now.with_host or now.leases:
            raise LedgerError(
                f"step {self.step} has {len(now.counted)} of {self.global_batch} samples counted, "
                f"{len(now.pool)} in the pool, {len(now.with_host)} with the host, {len(now.leases)} leases"
            )
        self._now = None
        self.step += 1
        return now.by_machine

    @property
    def full(self) -> bool:
        return len(self._open().counted) == self.global_batch

    @property
    def in_pool(self) -> int:
        return len(self._open().pool)

    @property
    def leases(self) -> dict[int, Lease]:
        return self._open().leases if self._now is not None else {}

    # -- the host ---------------------------------------------------------------------------------------

    def take(self, count: int) -> tuple[int, ...]:
        """At most `count` positions for the host, out of the pool."""
        now = self._open()
        taken = tuple(now.pool.popleft() for _ in range(min(count, len(now.pool))))
        now.with_host.update(taken)
        return taken

    def host_counts(self, positions: Sequence[int], machine: str) -> None:
        now = self._open()
        if not now.with_host.issuperset(positions):
            raise LedgerError("the host counts positions it does not hold")
        now.with_host.difference_update(positions)
        self._count(positions, machine)

    # -- the guests -------------------------------------------------------------------------------------

    def lease(self, guest: str, count: int) -> Lease:
        """Hand `count` positions from the end of the pool to a guest (the host takes from the front)."""
        now = self._open()
        if not 0 < count <= len(now.pool):
            raise LedgerError(f"a lease of {count} from a pool of {len(now.pool)}")
        positions = tuple(now.pool.pop() for _ in range(count))[::-1]
        lease = Lease(id=self._next_lease, guest=guest, step=self.step, positions=positions)
        self._next_lease += 1
        now.leases[lease.id] = lease
        return lease

    def trim(self, lease_id: int, keep: int) -> int:
        """The guest will deliver only the first `keep` of a lease; the others go back. Returns how many."""
        lease = self.leases.get(lease_id)
        if lease is None or not 0 < keep < len(lease.positions):
            return 0
        back = lease.positions[keep:]
        lease.positions = lease.positions[:keep]
        self._open().pool.extend(back)
        return len(back)

    def take_back(self, lease_id: int) -> int:
        """End a lease without its contribution: its samples go back to the pool. Returns how many."""
        now = self._open() if self._now is not None else None
        lease = now.leases.pop(lease_id, None) if now is not None else None
        if now is None or lease is None:
            return 0
        now.pool.extend(lease.positions)
        return len(lease.positions)

    def deliver(self, lease_id: int, count: int) -> bool:
        """Count a contribution. False (and nothing counted) if the lease is no longer open or differs."""
        lease = self.leases.get(lease_id)
        if lease is None or len(lease.positions) != count:
            return False
        del self._open().leases[lease_id]
        self._count(lease.positions, lease.guest)
        return True

    # -- samples ----------------------------------------------------------------------------------------

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        """The data set's indices of these positions."""
        return [int(self._epoch(p // self.samples)[p % self.samples]) for p in positions]

    def state(self) -> LedgerState:
        return LedgerState(samples=self.samples, global_batch=self.global_batch, step=self.step)

    def _epoch(self, epoch: int) -> Sequence[int]:
        if epoch not in self._epochs:
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._order(epoch)
        return self._epochs[epoch]

    def _count(self, positions: Sequence[int], machine: str) -> None:
        now = self._open()
        if not now.counted.isdisjoint(positions):
            raise LedgerError("a sample would be counted twice")
        now.counted.update(positions)
        now.by_machine[machine] = now.by_machine.get(machine, 0) + len(positions)

    def _open(self) -> _Step:
        if self._now is None:
            raise LedgerError("no step is open")
        return self._now
