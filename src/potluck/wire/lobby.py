"""Connections that are not authenticated yet, and which of them to close when there are too many.

PURE.

libzmq ends a handshake that takes too long, but accepts any number of connections at the same time, and each uses
an open file and some memory of the host. The connection to close is the oldest one of the address that has the
most. A guest authenticates within a moment, and somebody who opens many connections only displaces their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """One connection that is not authenticated yet."""

    descriptor: int
    address: str
    port: int
    """Port of the remote end; with the address, it distinguishes two connections that had the same descriptor."""
    since: float


class Lobby:
    """At most `most` unauthenticated connections, each for at most `stays_s`. After that it was admitted, or libzmq
    has ended it."""

    def __init__(self, *, most: int, stays_s: float) -> None:
        self.most, self.stays_s = most, stays_s
        self.turned_out = 0
        """Connections closed because there were too many."""
        self._visitors: dict[int, Visitor] = {}
        self._by_address: dict[str, dict[int, Visitor]] = {}

    def __len__(self) -> int:
        return len(self._visitors)

    def __contains__(self, descriptor: object) -> bool:
        return descriptor in self._visitors

    def came(self, visitor: Visitor) -> None:
        self.left(visitor.descriptor)
        self._visitors[visitor.descriptor] = visitor
        self._by_address.setdefault(visitor.address, {})[visitor.descriptor] = visitor

    def left(self, descriptor: int) -> None:
        """Remove a connection: it is closed, or it has sent a message, which only a peer with the key can do."""
        visitor = self._visitors.pop(descriptor, None)
        if visitor is None:
            return
        neighbours = self._by_address[visitor.address]
        del neighbours[descriptor]
        if not neighbours:
            del self._by_address[visitor.address]

    def too_many(self, now: float) -> list[Visitor]:
        """The connections to close now; they are removed from the list."""
        # Both tables are in the order in which people came.
        for descriptor in [v.descriptor for v in self._until(now - self.stays_s)]:
            self.left(descriptor)
        out: list[Visitor] = []
        while len(self._visitors) > self.most:
            crowd = max(self._by_address.values(), key=len)
            visitor = next(iter(crowd.values()))
            self.left(visitor.descriptor)
            out.append(visitor)
        self.turned_out += len(out)
        return out

    def make_way(self, count: int, came_before: float) -> list[Visitor]:
        """The oldest connections to close so that `count` others can be accepted; they leave the list."""
        out: list[Visitor] = []
        while self._visitors and len(out) < count:
            crowd = max(self._by_address.values(), key=len)
            visitor = next(iter(crowd.values()))
            if visitor.since > came_before:
                break
            self.left(visitor.descriptor)
            out.append(visitor)
        self.turned_out += len(out)
        return out

    def _until(self, then: float) -> list[Visitor]:
        early = []
        for visitor in self._visitors.values():
            if visitor.since > then:
                break
            early.append(visitor)
        return early
