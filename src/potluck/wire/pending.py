"""Connections that are not authenticated yet, and which of them to close when there are too many.

PURE.

libzmq ends a handshake that takes too long, but accepts any number of connections at the same time, and each uses
an open file and some memory of the host. The connection to close is the oldest one of the address that has the
most. A guest authenticates within a moment, and somebody who opens many connections only displaces their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedConnection:
    """One connection that is not authenticated yet."""

    descriptor: int
    address: str
    port: int
    """Port of the remote end; with the address, it distinguishes two connections that had the same descriptor."""
    since: float


class Pending:
    """At most `most` unauthenticated connections, each for at most `stays_s`. After that it was admitted, or libzmq
    has ended it."""

    def __init__(self, *, most: int, stays_s: float) -> None:
        self.most, self.stays_s = most, stays_s
        self.closed = 0
        """Connections closed because there were too many."""
        self._connections: dict[int, AcceptedConnection] = {}
        self._by_address: dict[str, dict[int, AcceptedConnection]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, descriptor: object) -> bool:
        return descriptor in self._connections

    def came(self, connection: AcceptedConnection) -> None:
        self.left(connection.descriptor)
        self._connections[connection.descriptor] = connection
        self._by_address.setdefault(connection.address, {})[connection.descriptor] = connection

    def left(self, descriptor: int) -> None:
        """Remove a connection: it is closed, or it has sent a message, which only a peer with the key can do."""
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        neighbours = self._by_address[connection.address]
        del neighbours[descriptor]
        if not neighbours:
            del self._by_address[connection.address]

    def too_many(self, now: float) -> list[AcceptedConnection]:
        """The connections to close now; they are removed from the list."""
        # Both tables are in the order in which people came.
        for descriptor in [v.descriptor for v in self._until(now - self.stays_s)]:
            self.left(descriptor)
        out: list[AcceptedConnection] = []
        while len(self._connections) > self.most:
            crowd = max(self._by_address.values(), key=len)
            connection = next(iter(crowd.values()))
            self.left(connection.descriptor)
            out.append(connection)
        self.closed += len(out)
        return out

    def make_way(self, count: int, came_before: float) -> list[AcceptedConnection]:
        """The oldest connections to close so that `count` others can be accepted; they leave the list."""
        out: list[AcceptedConnection] = []
        while self._connections and len(out) < count:
            crowd = max(self._by_address.values(), key=len)
            connection = next(iter(crowd.values()))
            if connection.since > came_before:
                break
            self.left(connection.descriptor)
            out.append(connection)
        self.closed += len(out)
        return out

    def _until(self, then: float) -> list[AcceptedConnection]:
        early = []
        for connection in self._connections.values():
            if connection.since > then:
                break
            early.append(connection)
        return early
