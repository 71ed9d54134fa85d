"""What a guest is asked to compute, and when its weights came. Owns no decision and no thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from potluck.hub.feed import NOTHING


@dataclass(slots=True, kw_only=True)
class Work:
    """A lease, or a common batch to be checked on."""

    id: int
    """The lease's number; for a check, the check's number."""
    check: bool
    step: int
    sizes: tuple[int, ...]
    received: float
    quota: int = 0
    """How many of its samples the host reckons with."""
    within_s: float = 0.0
    """When the host is done if that many are delivered; each one fewer costs it `host_sample_s` more."""
    host_sample_s: float = 0.0
    transfer_s: float = 0.0
    """What a coded message takes on this machine's link, each way."""
    tail_s: float = 0.0
    """What it takes from the last backward to the arrival at the host, as the host has measured it."""
    codec: str = ""
    """How its gradient is coded; empty: as the guest was told when it joined."""
    seed: int | None = None
    """Of a check: what the random generators are seeded with before the loop's body computes it."""
    samples: list[list[int]] | None = None
    batches: dict[int, Any] = field(default_factory=dict)
    over: bool = False
    """The host has taken it back, or has gone on."""

    @property
    def key(self) -> int:
        """Under which number its samples travel: a check's are negative."""
        return -self.id if self.check else self.id


@dataclass(slots=True)
class Arrivals:
    """When the changes of the newest version came."""

    version: int = NOTHING
    first: float = 0.0
    last: float = 0.0
    count: int = 0

    def note(self, version: int, now: float) -> None:
        if version != self.version:
            self.version, self.first, self.count = version, now, 0
        self.last = now
        self.count += 1

    def seconds(self, version: int, pieces: int) -> float:
        """How long all pieces of a version took to arrive; 0 where not all were seen."""
        if version != self.version or self.count != pieces or pieces < 2:
            return 0.0
        # The clock starts when the first piece is here already.
        return (self.last - self.first) * pieces / (pieces - 1)
