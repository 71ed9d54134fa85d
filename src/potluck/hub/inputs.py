"""The inputs of `HostProtocol.handle`: what happened. PURE.

The threads in `host` report what happened with one of these, and the protocol answers with `actions`. Payloads
(`Any`) are passed on unread, so a recorded sequence of inputs can be replayed without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from potluck.hub.actions import Verdict
from potluck.hub.feed import FixedTensor, Item, PieceState, TensorPart
from potluck.spec.messages import FromGuest


class _Input(Struct, frozen=True, tag=True, tag_field="input"):
    """Base of all inputs. Each message makes one; a frozen dataclass would take five times as long."""


# -- from the network -----------------------------------------------------------------------------------


class MessageArrived(_Input, frozen=True, kw_only=True):
    """A message of an authenticated peer."""

    guest: str
    message: FromGuest
    frames: tuple[Any, ...] = ()
    address: str = ""


class UnreadableArrived(_Input, frozen=True, kw_only=True):
    """Bytes from an authenticated peer that cannot be read."""

    guest: str
    why: str
    kind: str = ""
    """The kind of the message; empty where the bytes are no message at all."""
    address: str = ""


class OtherProtocolArrived(_Input, frozen=True, kw_only=True):
    """A message from an authenticated peer with another version of the protocol."""

    guest: str
    theirs: int
    address: str


class PeerUnreachable(_Input, frozen=True, kw_only=True):
    """Nothing can be sent to this guest any more: its process has ended, or it does not read."""

    guest: str


class PeerNotReading(_Input, frozen=True, kw_only=True):
    """The memory for unsent messages is full, and of all guests this one has not read for the longest time."""

    guest: str
    waiting_bytes: int


# -- time -----------------------------------------------------------------------------------------------


class Tick(_Input, frozen=True, kw_only=True):
    """Time has passed. Comes several times a second."""


class StoodStill(_Input, frozen=True, kw_only=True):
    """This host itself stood still for a while: it was asleep, stopped or overloaded."""

    seconds: float


# -- from the coder -------------------------------------------------------------------------------------


class PieceCoded(_Input, frozen=True, kw_only=True):
    """A piece of the replica has reached the weights' version."""

    index: int
    piece: PieceState


class PartRead(_Input, frozen=True, kw_only=True):
    """A whole piece or a part of a fixed tensor, read for a guest: the answer to `ReadPart`."""

    guest: str
    item: Item
    version: int
    payload: Any
    part: TensorPart | None = None


class ContributionDecoded(_Input, frozen=True, kw_only=True):
    """A contribution was added to the step's sum, or must not count: the answer to `Decode`."""

    guest: str
    lease: int
    loss_sum: float
    items: float = 0.0
    why_not: str | None = None
    wrong_norm: float | None = None
    """Its norm, if that is why it must not count: an upper bound, or infinity if it is not finite."""


class ReplicaHashed(_Input, frozen=True, kw_only=True):
    """The replica's hashes at a version, one for each piece: the answer to `HashReplica`."""

    version: int
    digests: bytes


# -- from the loader ------------------------------------------------------------------------------------


class FixedHashed(_Input, frozen=True, kw_only=True):
    """The host's frozen parameters and buffers with their hashes: the answer to `HashFixed`."""

    guest: str
    tensors: tuple[FixedTensor, ...]


class SamplesPacked(_Input, frozen=True, kw_only=True):
    """A micro-batch is ready to be sent: the answer to `SendSamples`."""

    guest: str
    lease: int
    batch: int
    tree: Any
    frames: tuple[Any, ...]


class SamplesNotPacked(_Input, frozen=True, kw_only=True):
    """A micro-batch that cannot be sent."""

    guest: str
    why: str


class AheadPacked(_Input, frozen=True, kw_only=True):
    """A micro-batch of the next step is ready to be sent: the answer to `SendAhead`. Without parts, it cannot be
    sent."""

    guest: str
    batch: int
    tree: Any = None
    parts: tuple[Any, ...] = ()


class SketchCompared(_Input, frozen=True, kw_only=True):
    """The outcome of a parity check: the answer to `CompareSketch`."""

    guest: str
    check: int
    verdict: Verdict


# -- from the training thread -----------------------------------------------------------------------------


class StepBegun(_Input, frozen=True, kw_only=True):
    """The weights are at the step's version, or will be when the device has finished its queue."""

    head_start_s: float = 0.0
    """See `Stepping.begin`."""


class BatchWanted(_Input, frozen=True, kw_only=True):
    """The training thread asks for its next micro-batch. The reply is a `Take`."""

    count: int
    made: int = 0
    """The samples of the micro-batch that a worker process has collated for it; 0: none."""
    computing: bool | None = None
    """Whether the host's device still computes. None: not known yet."""


class HostWaited(_Input, frozen=True, kw_only=True):
    """The training thread was idle, waiting for leases."""

    seconds: float


class HostLaunched(_Input, frozen=True, kw_only=True):
    """The host's device was given these samples."""

    positions: tuple[int, ...]
    sizes: tuple[int, ...]
    """The number of samples of each rank."""


class HostComputed(_Input, frozen=True, kw_only=True):
    """The host's device computed these samples in these seconds."""

    samples: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A common batch to be sent, copied before the loop's body can change it."""

    tree: Any = None
    frames: tuple[bytes, ...] = ()
    why_not: str = ""
    """Why such a batch cannot be sent; empty if it can."""
    same_again: bool = False
    """Reading it twice gave the same values. So guests with local data read it themselves, which verifies their
    data."""


class CommonComputed(_Input, frozen=True, kw_only=True):
    """The host's gradient of the common batch, and the batch as guests get it."""

    positions: tuple[int, ...]
    batch: Packed
    reference: Any
    """What guests' gradients are compared with; comes back in `CompareSketch`."""


class BuffersChanged(_Input, frozen=True, kw_only=True):
    """Computing changes buffers of the model. Guests have copies of their own."""

    module: str
    """The type of the first one's module."""
    names: tuple[str, ...]


class StepFilled(_Input, frozen=True, kw_only=True):
    """Every sample of the step is counted. The reply is a `StepResult`."""


class GradientKnown(_Input, frozen=True, kw_only=True):
    """The norm of the host's own gradient of a step that has ended, before the guests' were added."""

    step: int
    norm: float
    samples: int
    applied: bool
    """Whether the step's whole gradient was applied."""


class StepTimed(_Input, frozen=True, kw_only=True):
    """How long the last step took, without the script's work before it."""

    step: int
    samples: int
    seconds: float
    here: tuple[str, ...] = ()
    """Guests that run on the host's own machine, by their ids."""


class HostClosing(_Input, frozen=True, kw_only=True):
    """The run is over."""

    reason: str


Input = (
    MessageArrived
    | UnreadableArrived
    | OtherProtocolArrived
    | PeerUnreachable
    | PeerNotReading
    | Tick
    | StoodStill
    | PieceCoded
    | PartRead
    | ContributionDecoded
    | ReplicaHashed
    | FixedHashed
    | SamplesPacked
    | SamplesNotPacked
    | AheadPacked
    | SketchCompared
    | StepBegun
    | BatchWanted
    | HostWaited
    | HostLaunched
    | HostComputed
    | CommonComputed
    | BuffersChanged
    | StepFilled
    | GradientKnown
    | StepTimed
    | HostClosing
)
