"""Limits on authenticated connections: how many a host keeps, and how long an unfinished message may be.

PURE.

libzmq limits the size of a message's parts, but not their number, and keeps them until the last one arrives. It
also accepts any number of connections from a peer with the key. Honest guests use neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass

from potluck.wire.pending import AcceptedConnection


@dataclass(slots=True)
class _GuestConnection:
    accepted: AcceptedConnection
    messages: int = 0
    counted: int = -1
    """Number of messages at the last check."""
    mark_bytes: int = 0
    """Bytes received at the last check that also found a new message."""
    too_long: bool = False
    """Whether the last check found more bytes since `mark_bytes` than a message can have."""


class Admitted:
    """At most `most` authenticated connections, each with at most `most_bytes` of an unfinished message."""

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._connections: dict[int, _GuestConnection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def came(self, accepted: AcceptedConnection) -> None:
        self._connections.pop(accepted.descriptor, None)  # the newest is always the last
        self._connections[accepted.descriptor] = _GuestConnection(accepted)

    def spoke(self, descriptor: int) -> None:
        """A complete message of this connection has been read."""
        if (connection := self._connections.get(descriptor)) is not None:
            connection.messages += 1

    def left(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)

    def too_many(self, waiting: Container[int]) -> list[AcceptedConnection]:
        """The connections to close if there are too many: the newest ones of the address with the most."""
        if len(self._connections) <= self.most:
            return []
        inside = [c.accepted for number, c in self._connections.items() if number not in waiting]
        crowds = Counter(accepted.address for accepted in inside)
        out: list[AcceptedConnection] = []
        while len(inside) > self.most:
            crowd = max(crowds, key=lambda address: crowds[address])
            accepted = next(v for v in reversed(inside) if v.address == crowd)
            crowds[crowd] -= 1
            inside.remove(accepted)
            self.left(accepted.descriptor)
            out.append(accepted)
        return out

    def endless(self, received_bytes: Callable[[AcceptedConnection], int | None]) -> list[AcceptedConnection]:
        """The connections to close because of an endless message. Call it after all complete messages were read.

        `received_bytes` gives the bytes received on a connection so far.

        A message may have ended between that reading and this check, so only the second check in a row counts.
        """
        out: list[AcceptedConnection] = []
        for connection in list(self._connections.values()):
            received = received_bytes(connection.accepted)
            if received is None:
                continue
            if connection.messages != connection.counted:
                connection.counted, connection.mark_bytes = connection.messages, received
            too_long = received - connection.mark_bytes > self.most_bytes
            if too_long and connection.too_long:
                self.left(connection.accepted.descriptor)
                out.append(connection.accepted)
            connection.too_long = too_long
        return out
