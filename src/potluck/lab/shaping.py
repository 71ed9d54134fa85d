"""Decides what a link does to the bytes that cross it: its rate, its latency, and its scheduled faults.

PURE: times are given, in seconds of one monotonic clock. `proxy.py` asks before it reads a chunk and reports what
it read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from potluck.bounds import Finite, Many, Text
from potluck.errors import ConfigError

Direction = Literal["up", "down"]
"""up: from the side that connected, towards the target; down: back."""

Seconds = Annotated[float, Meta(ge=0, lt=1e9)]

QUANTUM_S = 0.002
"""A chunk takes about this long, so that many connections share a slow link smoothly."""
LEAST_QUANTUM_BYTES = 512
MOST_QUANTUM_BYTES = 64 * 1024
QUEUE_S = 0.1
"""The bytes that a pipe may hold besides those in transit, like the queue of a switch."""
LEAST_ROOM_BYTES = 64 * 1024
MOST_ROOM_BYTES = 8 * 1024 * 1024

CATCH_UP_S = 0.1
"""Data that waited while the computer was busy counts as sent during that time, up to this limit."""
IDLE_CREDIT_S = 0.002
"""An idle link loses its sending time, except for this much, so that a sender's short pause costs nothing."""


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A temporary fault of a link."""

    kind: Literal["delay", "limit", "blackhole", "reset", "half-open", "truncate", "flip"]
    """delay: `amount` seconds more latency. limit: at most `amount` bytes a second. blackhole: nothing passes; data
    in transit arrives when it ends, as after retransmission. reset: connections are reset, including new ones
    during the fault. half-open: all sent data is lost, including the end (FIN, RST), and a connection stays so.
    truncate: half of a chunk passes, then the stream ends. flip: one bit of every chunk is wrong."""
    at_s: Seconds
    """When it begins, counted from the proxy's start or from when the schedule was set."""
    for_s: Seconds = 0.0
    """How long it lasts; a reset may last no time at all."""
    amount: Finite = 0.0
    """Seconds of a delay; bytes per second of a limit."""
    direction: Literal["both", "up", "down"] = "both"
    """The affected direction; a reset always affects both."""

    def __post_init__(self) -> None:
        if not self.for_s and self.kind != "reset":
            raise ConfigError(f"the fault {self.kind} has no duration", hint="give for_s, in seconds")
        if self.kind in ("delay", "limit") and not 0 < self.amount < math.inf:
            unit = "seconds" if self.kind == "delay" else "bytes a second"
            raise ConfigError(f"the fault {self.kind} has amount {self.amount:g}", hint=f"give its {unit}")

    def active(self, now: float) -> bool:
        return self.at_s <= now < self.at_s + self.for_s


class LinkSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine's link, or a link that several share."""

    name: Text
    rate_bytes_per_s: Annotated[float, Meta(gt=0, lt=1e15)] | None = None
    """Unlimited when not given."""
    up_rate_bytes_per_s: Annotated[float, Meta(gt=0, lt=1e15)] | None = None
    """Rate at which the machine sends, if it differs."""
    latency_s: Seconds = 0.0
    """Latency from one end to the other."""
    faults: Many[Fault] = ()

    def rate(self, direction: Direction) -> float | None:
        """Bytes per second in one direction; None: unlimited."""
        return (self.up_rate_bytes_per_s if direction == "up" else None) or self.rate_bytes_per_s


class Bucket:
    """Limits one direction of a link to its rate, by tracking when the link will have sent the accepted bytes."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.free_at = -math.inf
        """When the next bytes may be taken: a time that has passed, or one to wait for."""

    def take(self, count: int, now: float, rate: float | None, since: float) -> float:
        """Take bytes at a rate, available since a time. Returns when the last of them has been sent."""
        if rate is None:
            return now
        # The link began to send them when they were there and it was free, even if nobody looked just then.
        began = max(self.free_at, min(since, now - IDLE_CREDIT_S), now - CATCH_UP_S)
        self.free_at = began + count / rate
        return self.free_at


class Policy:
    """What happens to each chunk that crosses a link in one direction.

    The bucket `shared` belongs to the link that comes after this one, the same for several links.
    """

    def __init__(self, spec: LinkSpec, direction: Direction, shared: Bucket | None = None) -> None:
        self._spec = spec
        self._direction = direction
        self._bucket = Bucket(spec.rate(direction))
        self._shared = shared or Bucket(None)
        self._faults: list[Fault] = []

    def add_faults(self, faults: Sequence[Fault], now: float) -> None:
        """Put faults on the schedule, their times counted from now; those that are over are forgotten."""
        mine = [f for f in faults if f.direction in ("both", self._direction) and f.kind != "reset"]
        kept = [f for f in self._faults if f.at_s + f.for_s > now]
        self._faults = kept + [replace(f, at_s=now + f.at_s) for f in mine]

    # -- before a chunk is read ------------------------------------------------------------------------------

    def held_until(self, now: float) -> float:
        """When a blackhole ends; -inf if there is none."""
        return max((f.at_s + f.for_s for f in self._active("blackhole", now)), default=-math.inf)

    def opens_at(self, now: float) -> float:
        """When the next chunk may be read: a time that has passed, or one to wait for."""
        return max(self._bucket.free_at, self._shared.free_at, self.held_until(now))

    def quantum_bytes(self, now: float) -> int:
        """How much to read at once."""
        rate = self._slowest(now)
        if rate is None:
            return MOST_QUANTUM_BYTES
        return int(min(max(rate * QUANTUM_S, LEAST_QUANTUM_BYTES), MOST_QUANTUM_BYTES))

    def room_bytes(self, now: float) -> int:
        """How much one connection may have in transit."""
        rate, latency_s = self._slowest(now), self._latency_s(now)
        if rate is None:
            return MOST_ROOM_BYTES
        return int(min(max(rate * (QUEUE_S + latency_s), LEAST_ROOM_BYTES), MOST_ROOM_BYTES))

    # -- after -----------------------------------------------------------------------------------------------

    def due(self, count: int, now: float, since: float) -> float:
        """When bytes that were just read, and were there since a time, arrive at the other end."""
        left = self._bucket.take(count, now, self._rate(now), since)
        left = max(left, self._shared.take(count, now, self._shared.rate_bytes_per_s, since))
        return left + self._latency_s(now)

    def vanishes(self, now: float) -> bool:
        """Whether the data that was read never arrives."""
        return bool(self._active("half-open", now))

    def edited(self, chunk: bytes, now: float) -> tuple[bytes, bool]:
        """The chunk as it arrives, and whether the stream ends with it."""
        if self._active("flip", now):
            middle = len(chunk) // 2
            chunk = chunk[:middle] + bytes([chunk[middle] ^ 0x10]) + chunk[middle + 1 :]
        if self._active("truncate", now):
            return chunk[: len(chunk) // 2], True
        return chunk, False

    # -- the link at this moment -----------------------------------------------------------------------------

    def _active(self, kind: str, now: float) -> list[Fault]:
        if not self._faults:
            return []
        return [f for f in self._faults if f.kind == kind and f.active(now)]

    def _rate(self, now: float) -> float | None:
        rates = [f.amount for f in self._active("limit", now)]
        own = self._spec.rate(self._direction)
        if own is not None:
            rates.append(own)
        return min(rates, default=None)

    def _slowest(self, now: float) -> float | None:
        rates = [rate for rate in (self._rate(now), self._shared.rate_bytes_per_s) if rate is not None]
        return min(rates, default=None)

    def _latency_s(self, now: float) -> float:
        return self._spec.latency_s + sum(f.amount for f in self._active("delay", now))


class Link:
    """A link's two policies, where its bytes are counted, and when it resets connections."""

    def __init__(self, spec: LinkSpec, number: int, shared: Mapping[Direction, Bucket], now: float) -> None:
        self.number = number
        plain = replace(spec, faults=())
        self.policies = {direction: Policy(plain, direction, bucket) for direction, bucket in shared.items()}
        self.next_reset = math.inf
        self.resets_until = -math.inf
        """Until then, connections that are made are reset too."""
        self._resets: list[tuple[float, float]] = []
        self.add_faults(spec.faults, now)

    def add_faults(self, faults: Sequence[Fault], now: float) -> None:
        for policy in self.policies.values():
            policy.add_faults(faults, now)
        self._resets += [(now + f.at_s, now + f.at_s + f.for_s) for f in faults if f.kind == "reset"]
        self.next_reset = min((start for start, _ in self._resets), default=math.inf)

    def resets_now(self, now: float) -> bool:
        """Whether to reset connections; true once for each fault."""
        if now < self.next_reset:
            return False
        self.resets_until = max(end for start, end in self._resets if start <= now)
        self._resets = [(start, end) for start, end in self._resets if start > now]
        self.next_reset = min((start for start, _ in self._resets), default=math.inf)
        return True
