"""What a guest must compute, what it stores for later, and when its weights arrived. Owns no thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from potluck.errors import WireError
from potluck.hub.feed import NOTHING
from potluck.spec.messages import MOST_AHEAD, AheadMessage


@dataclass(slots=True, kw_only=True)
class Work:
    """A lease, or a common batch to be checked on."""

    id: int
    """The lease's number; for a check, the check's number."""
    check: bool
    step: int
    sizes: tuple[int, ...]
    received: float
    epoch: int | None = None
    """The epoch of the step, from 0; None: unknown."""
    quota: int = 0
    """How many of its samples the host expects."""
    within_s: float = 0.0
    """When the host will be done if that many are delivered; each missing one costs it `host_sample_s`."""
    host_sample_s: float = 0.0
    transfer_s: float = 0.0
    """Seconds that a coded message takes on this machine's link, each way."""
    tail_s: float = 0.0
    """Seconds from the last backward to the arrival at the host, as measured by the host."""
    codec: str = ""
    """The codec of its gradient; empty: the one that the guest was told when it joined."""
    seed: int | None = None
    """For a check: the seed of the random generators before the loop's body computes it."""
    samples: list[list[int]] | None = None
    batches: dict[int, Any] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()
    """The numbers of its micro-batches that were sent ahead; 0 for one that was not."""
    over: bool = False
    """The host has taken it back, or has ended the step."""

    @property
    def key(self) -> int:
        """The number under which its samples are sent; negative for a check."""
        return -self.id if self.check else self.id


@dataclass(slots=True)
class Arrivals:
    """When the changes of the newest version arrived."""

    version: int = NOTHING
    first: float = 0.0
    last: float = 0.0
    count: int = 0
    first_bytes: int = 0
    nbytes: int = 0

    def note(self, version: int, now: float, nbytes: int) -> None:
        if version != self.version:
            self.version, self.first, self.count = version, now, 0
            self.first_bytes, self.nbytes = nbytes, 0
        self.last = now
        self.count += 1
        self.nbytes += nbytes

    def seconds(self, version: int, pieces: int) -> float:
        """How long all pieces of a version took to arrive; 0 if not all were seen."""
        if version != self.version or self.count != pieces or self.nbytes == self.first_bytes:
            return 0.0
        # The clock starts when the first piece is here already. It may be most of a small model.
        return (self.last - self.first) * self.nbytes / (self.nbytes - self.first_bytes)


@dataclass(slots=True)
class _Coming:
    """A micro-batch of which parts have arrived."""

    step: int
    nbytes: int
    tree: Any
    parts: list[bytes | memoryview] = field(default_factory=list)
    come_bytes: int = 0
    batch: Any = None
    complete: bool = False


class Kept:
    """Micro-batches that came ahead of their lease: at most `most_bytes`, and for at most two steps."""

    def __init__(self, most_bytes: int, unpack: Callable[[Any, list[bytes | memoryview]], Any]) -> None:
        self.most_bytes = most_bytes
        self._unpack = unpack
        self._batches: dict[int, _Coming] = {}
        self._named: frozenset[int] = frozenset()
        self._leased = NOTHING

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._batches.values())

    def add(self, message: AheadMessage, part: bytes | memoryview) -> None:
        """Add a part. Raises WireError if it exceeds the limit."""
        number = message.batch
        if message.step <= self._leased and number not in self._named:
            return  # its step has begun without it
        coming = self._batches.get(number)
        if coming is None:
            self._drop(lambda _, each: each.step < message.step - 1)
            if self.nbytes + message.bytes > self.most_bytes or len(self._batches) >= 2 * MOST_AHEAD:
                raise WireError(f"the host sent more ahead than the {self.most_bytes} bytes that are kept here")
            coming = self._batches[number] = _Coming(message.step, message.bytes, message.tree)
        coming.parts.append(part)
        coming.come_bytes += len(part)
        if coming.come_bytes > coming.nbytes:
            raise WireError(f"the host sent {coming.come_bytes} bytes of a batch of {coming.nbytes}")
        if coming.come_bytes == coming.nbytes:
            coming.batch, coming.complete = self._unpack(coming.tree, coming.parts), True
            coming.parts.clear()

    def leased(self, step: int, named: tuple[int, ...]) -> None:
        """A lease of this step needs these. Drop the others that were meant for it or for an earlier step."""
        self._leased, self._named = step, frozenset(named)
        self._drop(lambda number, each: each.step <= step and number not in self._named)

    def has(self, number: int) -> bool:
        coming = self._batches.get(number)
        return coming is not None and coming.complete

    def take(self, number: int) -> tuple[Any, int]:
        """Take a batch out, with its bytes."""
        coming = self._batches.pop(number)
        return coming.batch, coming.nbytes

    def clear(self) -> None:
        self._batches.clear()
        self._named, self._leased = frozenset(), NOTHING

    def _drop(self, which: Callable[[int, _Coming], bool]) -> None:
        for number in [number for number, each in self._batches.items() if which(number, each)]:
            del self._batches[number]
