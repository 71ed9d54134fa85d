"""The messages between host and guests: their fields, the bounds of each, and their raw frames.

PURE. One class for each kind. A message is decoded and checked once, on arrival (`wire.frames.Reader`); after that
it is an object with fields. Numbers are finite and bounded. Texts for people are cut and contain no terminal
control characters. Unknown fields are ignored: a field can be added without a new protocol.

`docs/reference/protocol.md` is generated from these classes: a class's docstring says when the message is sent, the
docstring under a field what it means.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from potluck.bounds import (
    LARGEST,
    Finite,
    Long,
    Natural,
    Positive,
    Settings,
    Short,
    Text,
    Whole,
)
from potluck.units import printable

Channel = Literal["control", "data"]
CONTROL: Channel = "control"
"""The control connection: small messages, sent immediately."""
DATA: Channel = "data"
"""The data connection: tensors, and messages that must stay in order with them."""

SHORTEST_S, LONGEST_S = 1e-6, 1e7
"""Durations that a guest may report, apart from 0: rates are computed from them."""
MOST_SIZES = 4096
"""Micro-batches of one lease; a host makes 512 at most."""
MOST_AHEAD = 512
"""The most micro-batches sent ahead that a guest stores."""
INDEX_BYTES = 8
"""One index of the data set in a frame: a little-endian int64."""

Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
HostSeconds = Annotated[float, Meta(ge=0.0, le=float(LARGEST))]
MOST_ITEMS = 1e15
"""The most items of one contribution; float64 counts exactly up to this number."""
Items = Annotated[float, Meta(ge=0.0, le=MOST_ITEMS)]
MOST_LOSS = 1e30
"""The largest summed loss of one contribution, small enough that any number of them can be added."""
LossSum = Annotated[float, Meta(ge=-MOST_LOSS, le=MOST_LOSS)]
MOST_DIMENSIONS = 64
"""The most dimensions of a tensor, as in torch."""
Shape = Annotated[tuple[Natural, ...], Meta(max_length=MOST_DIMENSIONS)]
Sizes = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MOST_SIZES)]
# Words for a person are cut, not refused: see `_clean`.
Label = Annotated[str, Meta(extra={"cut": 40})]
Name = Annotated[str, Meta(extra={"cut": 80})]
Goodbye = Annotated[str, Meta(extra={"cut": 200})]
Words = Annotated[str, Meta(extra={"cut": 500})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The raw frames of a kind of message: how many, and their content."""

    least: int = 0
    most: int = 0
    holds: str = ""


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all messages."""

    kind: ClassVar[str] = ""
    sender: ClassVar[str] = "guest"
    channel: ClassVar[Channel] = CONTROL
    frames: ClassVar[Frames] = Frames()

    def unfit(self, frames: Sequence[bytes | memoryview]) -> str:
        """Why these frames do not fit this message; empty if they do."""
        least, most = self.frames.least, self.frames.most
        if least <= len(frames) <= most:
            return ""
        wanted = str(least) if least == most else f"{least} to {most}"
        return f"it has {len(frames)} frames, not {wanted}"


@functools.cache
def _cuts(kind: type[Message]) -> tuple[tuple[str, int], ...]:
    """The fields of a kind that contain text for a person, and their greatest length."""
    found = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        found += [(name, meta.extra["cut"]) for meta in metas if isinstance(meta, Meta) and meta.extra]
    return tuple(found)


def _clean(message: Message) -> None:
    """Cut the texts of a message, and remove terminal control characters."""
    for name, limit in _cuts(type(message)):
        force_setattr(message, name, printable(getattr(message, name), limit))


def _at_least_shortest(message: Message, *names: str) -> None:
    """Raise durations between 0 and SHORTEST_S to it: a rate computed from a shorter one could be infinite."""
    for name in names:
        if 0.0 < getattr(message, name) < SHORTEST_S:
            force_setattr(message, name, SHORTEST_S)


def _unfit_indices(message: LeaseMessage | CheckMessage, frames: Sequence[bytes | memoryview]) -> str:
    samples = sum(message.sizes)
    if frames and len(frames[0]) != INDEX_BYTES * samples:
        return f"it has {len(frames[0])} bytes of indices for {samples} samples"
    return ""


# -- joining ------------------------------------------------------------------------------------------------


class HelloMessage(Message, frozen=True, kw_only=True):
    """The first message on a connection."""

    kind = "hello"
    name: Label = ""
    """The name that this machine would like to have."""
    device: Name = "?"
    """What it computes on."""
    platform: Name = "?"
    """Its operating system, as Python calls it."""
    potluck: Name = "?"
    """Version of potluck."""
    torch: Name = "?"
    """Version of torch."""
    python: Name = "?"
    """Version of Python."""
    before: Short = ""
    """When rejoining: the id of its last connection, which the host then closes."""

    def __post_init__(self) -> None:
        _clean(self)


class WaitMessage(Message, frozen=True, kw_only=True):
    """Answers `hello` while the script has not reached its training loop. `welcome` follows when it does, `bye` if
    it never does."""

    kind = "wait"
    sender = "host"
    reason: Words = ""
    """What the host waits for."""

    def __post_init__(self) -> None:
        _clean(self)


class Source(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The code for a guest to run: a recipe with its config, or a script whose files come as frames."""

    recipe: Short = ""
    config: Settings = {}
    files: Annotated[tuple[Long, ...], Meta(max_length=64)] = ()
    arguments: Annotated[tuple[Text, ...], Meta(max_length=1000)] = ()
    sha256: Short = ""
    imports: Annotated[dict[Short, Long], Meta(max_length=1000)] = {}

    def __post_init__(self) -> None:
        if bool(self.recipe) == bool(self.files):
            raise ValueError("a recipe or the files of a script, and not both")
        if self.files and not self.sha256:
            raise ValueError("files without their sha256")


class WelcomeMessage(Message, frozen=True, kw_only=True):
    """Answers `hello`."""

    kind = "welcome"
    sender = "host"
    frames = Frames(most=64, holds="the script's files")
    name: Name
    """The name that the guest gets."""
    host: Name
    """The host's name."""
    run: Name
    """The run's id."""
    codec: Name
    """Codec of gradients."""
    codec_down: Name
    """Codec of changes of the weights."""
    versions: Annotated[dict[Short, Short], Meta(max_length=16)]
    """The host's `potluck`, `torch` and `python`."""
    source: Source
    """What the guest runs: `{"recipe", "config"}` or `{"files", "arguments", "sha256", "imports"}`."""

    def __post_init__(self) -> None:
        _clean(self)


class ReadyMessage(Message, frozen=True, kw_only=True):
    """Its model is built."""

    kind = "ready"
    frames = Frames(
        least=1,
        most=1,
        holds='JSON `{"fingerprint": [[name, shape, dtype, role]…], "hashes": {name: blake2b-128}}`',
    )
    micro_batch: Natural
    """Samples that it computes at once."""
    largest_micro_batch: Natural
    """The most samples that it could compute at once."""
    ahead_bytes: Natural = 0
    """The most bytes of samples that it stores ahead of their lease; 0: it accepts none."""


class TensorMessage(Message, frozen=True, kw_only=True):
    """For each frozen parameter or buffer whose hash differs, in parts of 4 MiB."""

    kind = "tensor"
    sender = "host"
    channel = DATA
    frames = Frames(least=1, most=1, holds="raw values")
    name: Long
    """The tensor."""
    start: Natural
    """The index of the part's first value in the flat tensor."""


class WholeMessage(Message, frozen=True, kw_only=True):
    """A piece of the replica that the guest lacks."""

    kind = "whole"
    sender = "host"
    channel = DATA
    frames = Frames(least=1, most=1, holds="float32")
    piece: Natural
    """Number of the piece."""
    version: Natural
    """Version of the weights in it."""


class CheckMessage(Message, frozen=True, kw_only=True):
    """The batch of the parity check, once the host has computed it. Without indices, the tensors that the host
    computed follow as `samples`."""

    kind = "check"
    sender = "host"
    frames = Frames(most=1, holds="with local data the indices, unless reading a sample is random")
    check: Natural
    """Number of the check."""
    step: Natural
    """The step whose weights are used."""
    sizes: Sizes
    """Samples in each micro-batch; a check has one."""
    seed: Natural | None = None
    """Seed of the random generators before the loop's body."""
    epoch: Natural | None = None
    """The epoch of the step, from 0."""

    def unfit(self, frames: Sequence[bytes | memoryview]) -> str:
        return super().unfit(frames) or _unfit_indices(self, frames)


class SketchMessage(Message, frozen=True, kw_only=True):
    """Answers `check`."""

    kind = "sketch"
    channel = DATA
    frames = Frames(
        least=1,
        most=1,
        holds="float32: the norm of each trained tensor's gradient, then values at a fixed stride (some 262,144)",
    )
    check: Natural
    """Number of the check."""
    count: Natural
    """Samples it computed."""
    loss: Finite | None
    """The mean loss; null if it is not finite."""
    items: Items | None = None
    """As in `done`."""
    compute_s: Seconds
    """Time to compute them."""
    bf16: bool = False
    """Every layer with trained weights computes in bf16."""
    random: Annotated[dict[Short, Short], Meta(max_length=16)] = {}
    """`python`, `numpy`, `cpu` and the device's kind: blake2b-64 of each generator's state after the body."""
    micro_batch: Natural
    """As in `ready`."""
    largest_micro_batch: Natural
    """As in `ready`."""

    def __post_init__(self) -> None:
        _at_least_shortest(self, "compute_s")


class NoteMessage(Message, frozen=True, kw_only=True):
    """A note for the user of the guest, when the parity check compares it with the host's own spread."""

    kind = "note"
    sender = "host"
    text: Words
    """The note."""

    def __post_init__(self) -> None:
        _clean(self)


class RefuseMessage(Message, frozen=True, kw_only=True):
    """The guest may not take part and ends."""

    kind = "refuse"
    sender = "host"
    reason: Words = "?"
    """Why."""
    hint: Words = ""
    """What to do; set after a parity check, if samples cannot be sent, and by a listener that is not a host."""
    joined: bool = False
    """Whether it had taken part."""

    def __post_init__(self) -> None:
        _clean(self)


# -- steps --------------------------------------------------------------------------------------------------


class ChangeMessage(Message, frozen=True, kw_only=True):
    """Updates a piece from version `base` to `version`."""

    kind = "change"
    sender = "host"
    channel = DATA
    frames = Frames(least=1, most=1, holds="coded with its `codec`")
    piece: Natural
    """Number of the piece."""
    codec: Name = ""
    """Codec; empty: `codec_down` of `welcome`."""
    base: Whole
    """The version that the guest must hold."""
    version: Natural
    """The version that it then holds."""


class LeaseMessage(Message, frozen=True, kw_only=True):
    """A step begins."""

    kind = "lease"
    sender = "host"
    frames = Frames(most=1, holds="with local data the samples' indices, little-endian int64")
    lease: Natural
    """Number of the lease."""
    step: Natural
    """The step whose weights are used."""
    sizes: Sizes
    """Samples in each micro-batch."""
    quota: Natural = 0
    """How many of these samples the host expects back."""
    within_s: HostSeconds = 0.0
    """When the host will be done if that many are delivered."""
    host_sample_s: HostSeconds = 0.0
    """Seconds that each missing sample costs the host."""
    transfer_s: HostSeconds = 0.0
    """Seconds that the coded change or gradient takes on the guest's link, each way."""
    tail_s: HostSeconds = 0.0
    """Measured time from the last backward to the arrival."""
    codec: Name = ""
    """Codec of its gradient; empty: `codec` of `welcome`."""
    ahead: Annotated[tuple[Natural, ...], Meta(max_length=MOST_SIZES)] = ()
    """For each micro-batch the number under which it was sent ahead; 0, or no number: it comes as `samples`.
    Micro-batches sent ahead for this or an earlier step without a number here are dropped."""
    epoch: Natural | None = None
    """The epoch of the step, from 0."""

    def unfit(self, frames: Sequence[bytes | memoryview]) -> str:
        return super().unfit(frames) or _unfit_indices(self, frames)


class SamplesMessage(Message, frozen=True, kw_only=True):
    """For each micro-batch of a lease."""

    kind = "samples"
    sender = "host"
    channel = DATA
    frames = Frames(most=64, holds="the batch's tensors")
    lease: Whole
    """Number of the lease; negative: the number of a check."""
    batch: Natural
    """Number of the micro-batch in it."""
    tree: Any
    """Describes the batch."""


class AheadMessage(Message, frozen=True, kw_only=True):
    """A part of a micro-batch that the guest will probably compute in the next step. It is not leased yet: a later
    lease names it, or it is dropped."""

    kind = "ahead"
    sender = "host"
    channel = DATA
    frames = Frames(least=1, most=1, holds="the next bytes of the batch's tensors")
    batch: Positive
    """Number of the micro-batch, counted over the whole run."""
    step: Natural
    """The step that it belongs to."""
    bytes: Positive
    """Bytes of all its parts."""
    tree: Any = None
    """Describes the batch; only in its first part."""


class ClosingMessage(Message, frozen=True, kw_only=True):
    """Its last micro-batch starts: it will deliver the first `keep` samples in about `eta_s` and returns the
    rest."""

    kind = "closing"
    lease: Natural
    """Number of the lease."""
    keep: Natural
    """Samples that it will deliver."""
    eta_s: Seconds
    """Until the contribution arrives."""


class GradMessage(Message, frozen=True, kw_only=True):
    """A piece of the summed gradient is final."""

    kind = "grad"
    channel = DATA
    frames = Frames(least=1, most=1, holds="coded with the lease's `codec`")
    lease: Natural
    """Number of the lease."""
    piece: Natural
    """Number of the piece."""


class DoneMessage(Message, frozen=True, kw_only=True):
    """After the last `grad`."""

    kind = "done"
    channel = DATA
    lease: Natural
    """Number of the lease."""
    count: Natural
    """Samples in the sum."""
    loss_sum: LossSum
    """Their summed loss; 0 if it is not finite."""
    items: Items | None = None
    """Items that `backward(loss, items=…)` counted in them; null if samples are counted."""
    compute_s: Seconds
    """Time to compute them."""
    finite: bool
    """Whether loss and gradient are finite."""
    receive_s: Seconds
    """Time that the changes of this step took to arrive; 0: unknown."""
    micro_batch: Natural
    """As in `ready`."""
    largest_micro_batch: Natural
    """As in `ready`."""

    def __post_init__(self) -> None:
        _at_least_shortest(self, "compute_s", "receive_s")


class RevokeMessage(Message, frozen=True, kw_only=True):
    """The lease was taken back."""

    kind = "revoke"
    sender = "host"
    lease: Whole
    """Number of the lease."""


class StoppedMessage(Message, frozen=True, kw_only=True):
    """It has stopped working on a lease that is over."""

    kind = "stopped"
    lease: Whole
    """Number of the lease; negative: the number of a check."""
    computed: Natural
    """Samples that it had computed."""
    compute_s: Seconds
    """Time to compute them."""

    def __post_init__(self) -> None:
        _at_least_shortest(self, "compute_s")


class DroppedMessage(Message, frozen=True, kw_only=True):
    """A contribution did not count: the guest clears its residual."""

    kind = "dropped"
    sender = "host"
    lease: Whole = 0
    """Number of the lease; 0: the step was not applied."""


# -- comparing weights --------------------------------------------------------------------------------------


class HashMessage(Message, frozen=True, kw_only=True):
    """After the last `change` or `whole` of that version, and before any of a later one, so that both sides hash
    the same weights."""

    kind = "hash"
    sender = "host"
    channel = DATA
    version: Natural
    """The version to hash."""


class HashedMessage(Message, frozen=True, kw_only=True):
    """Answers `hash`, while it computes."""

    kind = "hashed"
    frames = Frames(
        least=1,
        most=1,
        holds="for each piece the blake2b-64 of its values as float32; empty if it does not hold that version",
    )
    version: Natural
    """The version that was hashed."""


class ResyncMessage(Message, frozen=True, kw_only=True):
    """They differ: the guest drops all its pieces and its work, and gets every piece as `whole`."""

    kind = "resync"
    sender = "host"
    channel = DATA
    version: Natural
    """The version that differed."""


# -- at any time --------------------------------------------------------------------------------------------


class AliveMessage(Message, frozen=True, kw_only=True):
    """Every second."""

    kind = "alive"
    sender = "both"


class TakenMessage(Message, frozen=True, kw_only=True):
    """It has read this many payload bytes from the data connection: credit for more."""

    kind = "taken"
    bytes: Natural
    """Bytes of all frames of the message that it has read."""
    ahead: bool = False
    """Whether they were sent ahead."""


class LeaveMessage(Message, frozen=True, kw_only=True):
    """It leaves the run."""

    kind = "leave"
    reason: Goodbye = ""
    """Why."""
    failed: bool = False
    """Whether its script failed."""

    def __post_init__(self) -> None:
        _clean(self)


class ByeMessage(Message, frozen=True, kw_only=True):
    """The run is over: the guest ends and does not reconnect."""

    kind = "bye"
    sender = "host"
    reason: Words = "finished"
    """Why it is over."""

    def __post_init__(self) -> None:
        _clean(self)


class UnknownMessage(Message, frozen=True, kw_only=True):
    """The host does not know this guest, which then starts again with `hello`. `potluck doctor` reads the
    versions."""

    kind = "unknown"
    sender = "host"
    protocol: Name = ""
    """Version of the protocol."""
    potluck: Name = ""
    """Version of potluck."""
    torch: Name = ""
    """Version of torch."""
    python: Name = ""
    """Version of Python."""
    probe: bool = False
    """Whether it is a listening `potluck probe`, not a host."""

    def __post_init__(self) -> None:
        _clean(self)


FromGuest = (
    HelloMessage
    | AliveMessage
    | ReadyMessage
    | TakenMessage
    | ClosingMessage
    | GradMessage
    | DoneMessage
    | StoppedMessage
    | SketchMessage
    | HashedMessage
    | LeaveMessage
)
FromHost = (
    WaitMessage
    | WelcomeMessage
    | TensorMessage
    | WholeMessage
    | CheckMessage
    | NoteMessage
    | RefuseMessage
    | ChangeMessage
    | LeaseMessage
    | SamplesMessage
    | AheadMessage
    | RevokeMessage
    | DroppedMessage
    | HashMessage
    | ResyncMessage
    | AliveMessage
    | ByeMessage
    | UnknownMessage
)
