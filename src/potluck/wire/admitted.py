"""Those who were let in: owns how many connections a host keeps of them, and who sends a message without an end.

PURE: it is told who came, said something and left, and how many bytes came; it must not know sockets or clocks.

libzmq limits the parts of a message, not their number: it keeps them until the last one is there. And it takes any
number of connections from whoever has the key. Guests do neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass

from potluck.wire.lobby import Visitor


@dataclass(slots=True)
class _Connection:
    visitor: Visitor
    messages: int = 0
    counted: int = -1
    """Messages when it was last looked at."""
    mark_bytes: int = 0
    """What had come when it was last looked at and a message had come as well."""
    too_long: bool = False
    """The last look found more behind the mark than a message can have."""


class Admitted:
    """At most `most` connections beside those that wait, each at most `most_bytes` into a message."""

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._connections: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def came(self, visitor: Visitor) -> None:
        self._connections.pop(visitor.descriptor, None)  # the newest is always the last
        self._connections[visitor.descriptor] = _Connection(visitor)

    def spoke(self, descriptor: int) -> None:
        """A whole message of it has been read."""
        if (connection := self._connections.get(descriptor)) is not None:
            connection.messages += 1

    def left(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)

    def too_many(self, waiting: Container[int]) -> list[Visitor]:
        """Who has to go: the newest of the address that has the most. Those who wait are counted elsewhere."""
        if len(self._connections) <= self.most:
            return []
        inside = [c.visitor for number, c in self._connections.items() if number not in waiting]
        crowds = Counter(visitor.address for visitor in inside)
        out: list[Visitor] = []
        while len(inside) > self.most:
            crowd = max(crowds, key=lambda address: crowds[address])
            visitor = next(v for v in reversed(inside) if v.address == crowd)
            crowds[crowd] -= 1
            inside.remove(visitor)
            self.left(visitor.descriptor)
            out.append(visitor)
        return out

    def endless(self, received_bytes: Callable[[Visitor], int | None]) -> list[Visitor]:
        """Who has to go, asked after all whole messages were read; `received_bytes`: of a connection so far.

        A message may have ended between that reading and this look, so only the second look in a row counts.
        """
        out: list[Visitor] = []
        for connection in list(self._connections.values()):
            received = received_bytes(connection.visitor)
            if received is None:
                continue
            if connection.messages != connection.counted:
                connection.counted, connection.mark_bytes = connection.messages, received
            too_long = received - connection.mark_bytes > self.most_bytes
            if too_long and connection.too_long:
                self.left(connection.visitor.descriptor)
                out.append(connection.visitor)
            connection.too_long = too_long
        return out
