"""Those who were let in: never too many, and nobody may be in the middle of a message without an end."""

from __future__ import annotations

from potluck.wire.admitted import Admitted
from potluck.wire.pending import AcceptedConnection


def connection(descriptor: int, address: str = "10.0.0.1") -> AcceptedConnection:
    return AcceptedConnection(descriptor=descriptor, address=address, port=1000 + descriptor, since=0.0)


def inside(*connections: AcceptedConnection, most: int = 4) -> Admitted:
    admitted = Admitted(most=most, most_bytes=100)
    for one in connections:
        admitted.came(one)
    return admitted


def numbers(connections: list[AcceptedConnection]) -> list[int]:
    return [one.descriptor for one in connections]


def test_the_newest_of_the_largest_crowd_go() -> None:
    admitted = inside(connection(1, "10.0.0.9"), *(connection(n) for n in range(2, 8)), connection(8, "10.0.0.9"))
    assert numbers(admitted.too_many(waiting=())) == [7, 6, 5, 4]
    assert admitted.too_many(waiting=()) == []
    assert len(admitted) == 4


def test_one_that_is_pending_is_counted_there() -> None:
    admitted = inside(*(connection(n) for n in range(6)))
    assert admitted.too_many(waiting={4, 5}) == []
    assert numbers(admitted.too_many(waiting={0})) == [5]


def test_a_descriptor_that_came_again_is_the_newest() -> None:
    admitted = inside(connection(1), connection(2), connection(3))
    admitted.came(connection(1))
    admitted.came(connection(4))
    admitted.left(2)
    admitted.left(2)
    admitted.came(connection(5))
    admitted.came(connection(6))
    assert numbers(admitted.too_many(waiting=())) == [6]


class Bytes:
    """How much has come over each connection."""

    def __init__(self, **counts: int) -> None:
        self.counts: dict[int, int] = {}

    def __call__(self, one: AcceptedConnection) -> int | None:
        return self.counts.get(one.descriptor)


def test_a_message_without_an_end_is_found_and_others_are_left_alone() -> None:
    admitted, received = inside(connection(1), connection(2), connection(3)), Bytes()
    out: list[int] = []
    for turn in range(20):
        received.counts = {1: 90 * turn, 2: 90 * turn}  # of the third nothing can be known
        admitted.spoke(1)  # much, but in messages that end
        out += numbers(admitted.endless(received))
    assert out == [2]
    assert len(admitted) == 2


def test_what_came_before_the_first_look_is_not_held_against_anybody() -> None:
    admitted, received = inside(connection(1)), Bytes()
    received.counts[1] = 10_000
    assert not admitted.endless(received)
    assert not admitted.endless(received)


def test_a_message_that_ended_just_before_the_look_is_forgiven() -> None:
    admitted, received = inside(connection(1)), Bytes()
    assert not admitted.endless(received)
    for turn in range(1, 50):
        received.counts[1] = 150 * turn
        assert not admitted.endless(received), "it was there, and only not yet read"
        admitted.spoke(1)
        assert not admitted.endless(received)


def test_messages_of_a_connection_that_nobody_knows_are_no_news() -> None:
    admitted = inside()
    admitted.spoke(7)
    assert len(admitted) == 0
