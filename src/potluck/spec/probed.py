"""What `potluck probe` measured: a device, a link, each way over it; and what a plan needs of that.

Plain data that round-trips through JSON. It measures nothing and predicts nothing. None: not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.spec.collectives import CollectiveRow
from potluck.spec.measured import Measured

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What computes on one machine, and how fast it does."""

    name: str
    """Of the machine."""
    device: str = ""
    reason: str = ""
    """Why this device."""
    training: str = ""
    """What was trained, in words: gpt depth 2, sequence 128, fp32."""
    model: str = ""
    """The same as `potluck plan --model` takes it; empty where plan has no such model."""
    sequence: int | None = None
    parameters: int | None = None
    samples_per_s: float | None = None
    """Forward and backward, at the micro-batch that was fastest."""
    samples_variation: float | None = None
    """Standard deviation ÷ mean over all the runs at that size."""
    flops_per_s: float | None = None
    """The same in effective FLOP/s."""
    micro_batch: int | None = None
    largest_micro_batch: int | None = None
    """Estimated from the two below, not tried."""
    saved_bytes_per_sample: float | None = None
    """What autograd keeps of a sample for its backward."""
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    matmul_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Of large square matrices, by number format; one that is missing cannot be done here."""
    memory_bytes_per_s: float | None = None
    """Read and written, by one large copy within the device's memory."""
    to_device_bytes_per_s: float | None = None
    from_device_bytes_per_s: float | None = None
    note: str = ""
    """Why these figures are not to be believed, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """Of small messages there and back, or of opening a TCP connection."""

    count: int
    p50_s: float
    p99_s: float
    jitter_s: float
    """The mean difference between one and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Payload that arrived, where it arrived."""

    bytes_per_s: float
    variation: float | None = None
    """Standard deviation ÷ mean over tenths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction, each time over another kind of connection, in turn."""

    ours: Rate | None = None
    """Encrypted, as in a training."""
    bare: Rate | None = None
    """One plain TCP connection."""
    iperf3: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedPath:
    """From an address of this machine to one of the other's."""

    address: str
    source: str = ""
    interface: str = ""
    used: bool = False
    """What a run would use."""
    idle: RoundTrips | None = None
    loaded: RoundTrips | None = None
    """While tensors cross the link."""
    out: Way = field(default_factory=Way)
    """From here to there."""
    back: Way = field(default_factory=Way)
    both_out: Way = field(default_factory=Way)
    """From here to there, while as much as possible comes back."""
    both_back: Way = field(default_factory=Way)
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @property
    def slower_bytes_per_s(self) -> float | None:
        """Encrypted payload in the slower direction."""
        rates = [way.ours.bytes_per_s for way in (self.out, self.back) if way.ours is not None]
        return min(rates) if len(rates) == 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """One `potluck probe`, and what its file holds."""

    here: DeviceSpeed
    there: DeviceSpeed | None = None
    paths: tuple[ProbedPath, ...] = ()
    """The used one first."""
    collectives: tuple[CollectiveRow, ...] = ()
    """Of the group that this probe was a rank of."""
    link_kind: str = ""
    """What is between those ranks, at the slowest: memory or tcp."""
    format: int = FORMAT

    @property
    def link(self) -> ProbedPath | None:
        return next((path for path in self.paths if path.used), None)

    def measured(self) -> tuple[Measured, ...]:
        """As a plan reads it. The link is the slower machine's: the other would be the host of several."""
        sides = [side for side in (self.here, self.there) if side is not None]
        guest = min(reversed(sides), key=lambda side: side.flops_per_s or 0.0) if len(sides) == 2 else None
        return tuple(_measured(side, self.link if side is guest else None) for side in sides)

    def to_dict(self) -> dict[str, Any]:
        table = {**dataclasses.asdict(self), "collectives": [row.to_dict() for row in self.collectives]}
        return {**table, "measured": [machine.to_dict() for machine in self.measured()]}


def _measured(side: DeviceSpeed, link: ProbedPath | None) -> Measured:
    return Measured(
        name=side.name,
        device=side.device,
        samples_per_s=side.samples_per_s,
        model=side.model,
        sequence=side.sequence,
        flops_per_s=side.flops_per_s,
        memory_bytes=side.memory_bytes,
        link_bytes_per_s=link.slower_bytes_per_s if link is not None else None,
        latency_s=link.idle.p50_s / 2 if link is not None and link.idle is not None else None,
        micro_batch=side.micro_batch,
    )
