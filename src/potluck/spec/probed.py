"""The results of `potluck probe`: a device, a link and its directions, and the part that a plan needs.

None means not measured.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import force_setattr

from potluck.bounds import Finite, Many, Named, Natural, Text
from potluck.spec.collective_rows import CollectiveRow
from potluck.spec.measured import Measured

FORMAT = 1


class DeviceSpeed(Struct, frozen=True, kw_only=True):
    """The device of one machine and its speed."""

    name: Text
    """Name of the machine."""
    device: Text = ""
    reason: Text = ""
    """Why this device was chosen."""
    training: Text = ""
    """Description of what was trained: gpt depth 2, sequence 128, fp32."""
    model: Text = ""
    """Name of that model as in `potluck plan --model`; empty if plan has no such model."""
    sequence: Natural | None = None
    parameters: Natural | None = None
    samples_per_s: Finite | None = None
    """Samples per second of forward and backward, at the fastest micro-batch."""
    samples_variation: Finite | None = None
    """Standard deviation ÷ mean over all measurements at that size."""
    flops_per_s: Finite | None = None
    """`samples_per_s` in effective FLOP/s."""
    micro_batch: Natural | None = None
    largest_micro_batch: Natural | None = None
    """Estimated from `saved_bytes_per_sample` and the free memory, not tried."""
    saved_bytes_per_sample: Finite | None = None
    """Memory that autograd keeps for the backward of a sample."""
    memory_bytes: Natural | None = None
    memory_free_bytes: Natural | None = None
    matmul_flops_per_s: Named[Finite] = {}
    """Products of large square matrices, by number format; an unsupported format is missing."""
    memory_bytes_per_s: Finite | None = None
    """Bytes read and written per second by one large copy within the device's memory."""
    to_device_bytes_per_s: Finite | None = None
    from_device_bytes_per_s: Finite | None = None
    note: Text = ""
    """Why these figures are not reliable, if that is known."""


class RoundTrips(Struct, frozen=True, kw_only=True):
    """Round-trip times of small messages, or of opening a TCP connection."""

    count: Natural
    p50_s: Finite
    p99_s: Finite
    jitter_s: Finite
    """Mean difference between consecutive round trips."""


class Rate(Struct, frozen=True, kw_only=True):
    """Payload rate, measured at the receiver."""

    bytes_per_s: Finite
    variation: Finite | None = None
    """Standard deviation ÷ mean over tenths of a second."""


class Way(Struct, frozen=True, kw_only=True):
    """The rates of one direction over different kinds of connections."""

    ours: Rate | None = None
    """Rate of the encrypted connection, as in a run."""
    bare: Rate | None = None
    """Rate of one plain TCP connection."""
    iperf3: Rate | None = None


class ProbedPath(Struct, frozen=True, kw_only=True):
    """From an address of this machine to one of the other's."""

    address: Text
    source: Text = ""
    interface: Text = ""
    used: bool = False
    """Whether a run would use this one."""
    idle: RoundTrips | None = None
    loaded: RoundTrips | None = None
    """Round trips while tensors are sent."""
    out: Way = Way()
    """From this machine to the other."""
    back: Way = Way()
    both_out: Way = Way()
    """From this machine to the other, while the other sends as fast as it can."""
    both_back: Way = Way()
    notes: Many[Text] = ()
    """What could not be measured, and why."""

    @property
    def slower_bytes_per_s(self) -> float | None:
        """Payload rate of the encrypted connection in the slower direction."""
        rates = [way.ours.bytes_per_s for way in (self.out, self.back) if way.ours is not None]
        return min(rates) if len(rates) == 2 else None


class Probed(Struct, frozen=True, kw_only=True):
    """The results of one `potluck probe`: the content of its file."""

    here: DeviceSpeed
    there: DeviceSpeed | None = None
    paths: Many[ProbedPath] = ()
    """The used one first."""
    collectives: Many[CollectiveRow] = ()
    """Rows of the group in which this probe was a rank."""
    link_kind: Text = ""
    """Kind of the slowest link between the ranks: memory or tcp."""
    measured: Many[Measured] = ()
    """The machines as a plan reads them; made from the fields above."""
    format: Natural = FORMAT

    def __post_init__(self) -> None:
        sides = [side for side in (self.here, self.there) if side is not None]
        # The link is the slower machine's, since the faster one would host.
        guest = min(reversed(sides), key=lambda side: side.flops_per_s or 0.0) if len(sides) == 2 else None
        machines = tuple(_measured(side, self.link if side is guest else None) for side in sides)
        force_setattr(self, "measured", machines)

    @property
    def link(self) -> ProbedPath | None:
        return next((path for path in self.paths if path.used), None)


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
