"""The actions that the host's protocol requests: the outputs of `HostProtocol.handle`. PURE.

They are Structs, like the inputs, because a frozen dataclass takes a microsecond to make, and each message needs
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from potluck.hub.feed import Item, TensorPart
from potluck.spec.events import RunEvent
from potluck.spec.messages import FromHost


class Send(Struct, frozen=True, kw_only=True):
    """Send a message to a guest."""

    guest: str
    message: FromHost
    frames: tuple[Any, ...] = ()


class SendWelcome(Struct, frozen=True, kw_only=True):
    """Send a guest what it needs to build the model."""

    guest: str
    name: str


class SendSamples(Struct, frozen=True, kw_only=True):
    """Fetch and pack the samples of one micro-batch, and report `SamplesPacked`."""

    guest: str
    lease: int
    batch: int
    positions: tuple[int, ...]


class SendAhead(Struct, frozen=True, kw_only=True):
    """Fetch and pack the samples of a micro-batch of the next step, and report `AheadPacked`."""

    guest: str
    batch: int
    positions: tuple[int, ...]
    part_bytes: int
    """The largest part to cut it into."""


class HashFixed(Struct, frozen=True, kw_only=True):
    """A guest's model fits: hash the frozen parameters and buffers, and report `FixedHashed`."""

    guest: str


class ReadPart(Struct, frozen=True, kw_only=True):
    """Read a whole piece, or a part of a fixed tensor, and report `PartRead`."""

    guest: str
    item: Item
    part: TensorPart | None = None


class CodeChange(Struct, frozen=True, kw_only=True):
    """Bring the replica to the weights' version, and report each `PieceCoded`."""

    codec: str = ""
    """Empty: the run's initial codec."""


class ReadPiece(Struct, frozen=True, kw_only=True):
    """A piece of a contribution has arrived: make it ready to be added while the others arrive."""

    guest: str
    lease: int
    index: int
    payload: Any
    codec: str = ""
    """Empty: the run's initial codec."""


class Decode(Struct, frozen=True, kw_only=True):
    """Check a complete contribution, add it to the step's sum and report `ContributionDecoded`."""

    guest: str
    lease: int
    pieces: dict[int, Any]
    loss_sum: float
    count: int
    items: float = 0.0
    codec: str = ""
    """Empty: the run's initial codec."""


class CompareSketch(Struct, frozen=True, kw_only=True):
    """Compare a guest's gradient of the common batch with the host's, and report `SketchCompared`."""

    guest: str
    check: int
    reference: Any
    """The host's own result; None if it is no longer stored."""
    sketch: Any
    loss: float
    items: float | None = None
    random: Mapping[str, str] = {}
    """Digests of the guest's random generators after it."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The result of a comparison."""

    cosine: float
    why_not: str | None = None
    """Why the guest's gradient cannot be trusted, for a person. None: it can be trusted."""
    spread: float | None = None
    """The cosine of the host's own two gradients of the batch, where the strict limits did not decide."""
    rounded: bool = False
    """It agrees with the host's gradient at the weights that guests hold, which the codec has rounded."""
    unmatched: frozenset[str] = frozenset()
    """Random generators that drew different numbers on the guest."""
    again: bool = False
    """Random numbers may be the reason, so compare again, with the host's spread."""
    void: str = ""
    """Why no comparison was possible; empty if it was."""


class HashReplica(Struct, frozen=True, kw_only=True):
    """Hash the replica at this version, and report `ReplicaHashed`."""

    version: int


class Emit(Struct, frozen=True, kw_only=True):
    """Tell the log and the view."""

    event: RunEvent


class LimitNorm(Struct, frozen=True, kw_only=True):
    """From now on a contribution counts up to this norm, divided by its samples."""

    most_a_sample: float


class CommonBatch(Struct, frozen=True, kw_only=True):
    """What the host's training thread must compute for a check."""

    samples: int
    seed: int
    """Every machine seeds its random generators with it before the loop's body computes the batch."""
    twice: frozenset[str] | None = None
    """Compute the batch a second time, with another seed for these generators. None: once."""


class Take(Struct, frozen=True, kw_only=True):
    """The training thread's next micro-batch, or what it does instead. Exactly one of the four is set."""

    positions: tuple[int, ...] = ()
    common: CommonBatch | None = None
    """How to compute the samples if they are a common batch."""
    full: bool = False
    """The step is complete."""
    wait_until: float | None = None
    idle: bool = True
    """Whether that wait counts as time lost; not while the host's device computes."""
    ask_device: bool = False
    """Ask again, and say whether the host's device still computes."""


class StepResult(Struct, frozen=True, kw_only=True):
    """The result of a step."""

    samples: dict[str, int]
    wait_s: float
    dropped_samples: int
    taken_back_samples: int
    predicted_s: float | None
    micro_batches: dict[str, tuple[int, ...]] = {}
    """The sizes of every machine's micro-batches that were counted."""
    guests_loss_sum: float = 0.0
    guests_items: float = 0.0
    """Items that `backward(loss, items=…)` counted on that machine; 0 if samples are counted."""
    ahead_samples: int = 0
    """Leased samples that had been sent before their lease."""
    unneeded_samples: int = 0
    """Samples sent ahead that no lease of the guest used."""
    unneeded_bytes: int = 0


class Reply(Struct, frozen=True, kw_only=True):
    """The answer to the training thread. An input gives at most one, after all other actions."""

    value: Take | StepResult


class Wake(Struct, frozen=True, kw_only=True):
    """Something that the training thread may be waiting for has changed."""


class Forget(Struct, frozen=True, kw_only=True):
    """The guest is gone: drop what is held for it."""

    guest: str


Action = (
    Send
    | SendWelcome
    | SendSamples
    | SendAhead
    | HashFixed
    | ReadPart
    | CodeChange
    | ReadPiece
    | Decode
    | CompareSketch
    | HashReplica
    | LimitNorm
    | Emit
    | Wake
    | Forget
    | Reply
)
