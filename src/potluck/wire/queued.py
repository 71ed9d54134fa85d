"""The bytes queued for all peers of a host, and which peers to disconnect when there are too many.

If a peer does not read, all messages to it stay in this machine's memory. All peers share one budget. When it is
used up, the peers are disconnected whose queues have not moved for the longest time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

TRACKED_BYTES = 2 << 20
"""Tracking when a message has been sent costs about 30 µs in Python. So messages are tracked in groups of 2 MiB:
they are sent in order, so when the last of a group has been sent, all have."""
_MOST_SMALL = 1024


LEAST_QUEUED_BYTES, MOST_QUEUED_BYTES = 256 << 20, 4 << 30


def budget_bytes(memory_bytes: int) -> int:
    """The most queued bytes for all peers together on a machine with this memory: a sixteenth of it, within
    bounds."""
    return max(LEAST_QUEUED_BYTES, min(MOST_QUEUED_BYTES, memory_bytes // 16))


class Tracker(Protocol):
    """Tells whether a message has been sent."""

    @property
    def done(self) -> bool: ...


@dataclass(slots=True)
class _Queue:
    moved: float
    """When the queue last sent something, or was last empty."""
    messages: deque[tuple[Tracker, int]] = field(default_factory=deque)
    total_bytes: int = 0


class Queued:
    """Queued bytes, at most `most_bytes` for all peers together."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self._queues: dict[bytes, _Queue] = {}
        self._small: dict[bytes, int] = {}
        """Bytes of untracked messages, possibly of peers that are gone."""

    def to_track(self, peer: bytes, size_bytes: int) -> int | None:
        """For a message about to be sent: the bytes to count if it is to be tracked, else None."""
        total = self._small.pop(peer, 0) + size_bytes
        if total >= TRACKED_BYTES:
            return total
        if len(self._small) >= _MOST_SMALL:
            self._small.clear()
        self._small[peer] = total
        return None

    def sent(self, peer: bytes, tracker: Tracker, size_bytes: int, now: float) -> None:
        queue = self._queues.setdefault(peer, _Queue(now))
        queue.messages.append((tracker, size_bytes))
        queue.total_bytes += size_bytes
        self.total_bytes += size_bytes
        self._look_at(peer, queue, now)

    def look(self, now: float) -> None:
        """Update the counts from the messages that were sent."""
        for peer, queue in list(self._queues.items()):
            self._look_at(peer, queue, now)

    def stuck(self, now: float) -> list[tuple[bytes, int]]:
        """The peers to disconnect and their queued bytes, which are no longer counted."""
        if self.total_bytes <= self.most_bytes:
            return []
        self.look(now)
        out: list[tuple[bytes, int]] = []
        for peer in sorted(self._queues, key=lambda peer: self._queues[peer].moved):
            if self.total_bytes <= self.most_bytes:
                break
            queue = self._queues.pop(peer)
            self.total_bytes -= queue.total_bytes
            out.append((peer, queue.total_bytes))
        return out

    def _look_at(self, peer: bytes, queue: _Queue, now: float) -> None:
        while queue.messages and queue.messages[0][0].done:
            _, size_bytes = queue.messages.popleft()
            queue.total_bytes -= size_bytes
            self.total_bytes -= size_bytes
            queue.moved = now
        if not queue.messages:
            self._queues.pop(peer, None)
