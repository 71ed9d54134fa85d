"""What the host's protocol asks the outside to do. Owns the vocabulary; does nothing itself. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.spec.events import RunEvent
from potluck.spec.messages import FromHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to a guest."""

    guest: str
    message: FromHost
    frames: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWelcome:
    """Send a guest what it needs to build the model."""

    guest: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSamples:
    """Fetch the samples of one micro-batch and send them."""

    guest: str
    lease: int
    batch: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReplica:
    """A guest's model fits: see which frozen tensors it lacks, then bring it the replica."""

    guest: str
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Check a complete contribution and add it to the step's sum."""

    guest: str
    lease: int
    pieces: dict[int, Any]
    loss_sum: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSketch:
    """Compare a guest's gradient of the common batch with the host's."""

    guest: str
    check: int
    sketch: Any
    loss: float
    random: Mapping[str, str] = field(default_factory=dict)
    """Digests of the guest's random generators after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison came to: the outside's answer to `CompareSketch`."""

    cosine: float
    why_not: str | None = None
    """In words, why the guest's gradient cannot be trusted. None: it can."""
    spread: float | None = None
    """The cosine of the host's own two gradients of the batch, where the strict limits did not decide."""
    unmatched: frozenset[str] = frozenset()
    """Random generators that drew other numbers on the guest."""
    again: bool = False
    """Random numbers may be the reason: another comparison, with the host's spread, can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashReplica:
    """Hash the replica at this version, beside everything else."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tell the log and the view."""

    event: RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pump:
    """See whether this guest can be sent more."""

    guest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Something the training thread may be waiting for has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The guest is gone: drop what is held for it."""

    guest: str


Action = (
    Send
    | SendWelcome
    | SendSamples
    | SendReplica
    | Decode
    | CompareSketch
    | HashReplica
    | Emit
    | Pump
    | Wake
    | Forget
)
