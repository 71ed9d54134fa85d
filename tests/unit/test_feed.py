"""A guest always ends with every piece at the replica's version, in whatever order it is coded and sent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import WireError
from potluck.hub.feed import NOTHING, PENDING, Feed, Item, PieceState, TensorPart

CHANGE, WHOLE = 10, 80


@dataclass
class Replica:
    """The coder in small: versions of pieces, and answers that it gives when it comes to them."""

    state: list[PieceState]
    version: int = 0
    asked: deque[Item] = field(default_factory=deque)

    def update(self) -> None:
        self.version += 1

    def code(self, index: int) -> None:
        old = self.state[index]
        if old.version != self.version:
            self.state[index] = PieceState(old.version, self.version, CHANGE, WHOLE)


@dataclass
class Guest:
    """Takes what arrives, in order, and refuses a change that does not start from what it holds."""

    have: list[int]
    tensors: list[str] = field(default_factory=list)

    def take(self, message: tuple[str, int, int, int, int]) -> None:
        kind, index, base, version, _ = message
        if kind == "tensor":
            self.tensors.append(str(index))
            return
        if kind == "change":
            assert self.have[index] == base, "a change on the wrong base"
        self.have[index] = version


class World:
    def __init__(self, pieces: int, window: int, tensors: int) -> None:
        self.replica = Replica([PieceState(NOTHING, NOTHING, CHANGE, WHOLE) for _ in range(pieces)])
        self.feed = Feed(pieces=pieces, window_bytes=window)
        self.feed.tensors.extend(TensorPart(str(i), 0, 1, 25) for i in range(tensors))
        self.feed.open = True
        self.guest = Guest([NOTHING] * pieces)
        self.wire: deque[tuple[str, int, int, int, int]] = deque()
        self.parts = 0

    def pump(self) -> None:
        """As the host's I/O thread does it."""
        state = list(self.replica.state)
        while (item := self.feed.next(state)) is not None:
            assert self.feed.open
            before = self.feed.in_flight_bytes
            most = max(self.feed.window_bytes, 2 * item.nbytes)
            assert before == 0 or before + item.nbytes <= most, "more than the window, and than two of a kind"
            if item.kind == "change":
                piece = state[item.index]
                assert self.feed.have[item.index] not in (NOTHING, PENDING)
                self.wire.append(("change", item.index, piece.base, piece.version, item.nbytes))
                self.feed.change_sent(item, piece.version)
            else:
                if item.kind == "whole":
                    assert self.feed.have[item.index] != PENDING
                self.feed.asked(item)
                self.replica.asked.append(item)

    def answer(self) -> None:
        """The coder reads what was asked for at the version that the piece has now."""
        if not self.replica.asked:
            return
        item = self.replica.asked.popleft()
        if item.kind == "tensor":
            self.wire.append(("tensor", self.parts, 0, 0, item.nbytes))
            self.parts += 1
            self.feed.answered(item, 0)
        else:
            version = self.replica.state[item.index].version
            self.wire.append(("whole", item.index, 0, version, item.nbytes))
            self.feed.answered(item, version)
        self.pump()

    def deliver(self) -> None:
        if self.wire:
            message = self.wire.popleft()
            self.guest.take(message)
            self.feed.taken(message[-1])
            self.pump()

    def drain(self) -> None:
        self.feed.open = True
        for index in range(len(self.replica.state)):
            self.replica.code(index)
        self.pump()
        for _ in range(1000):
            if not self.replica.asked and not self.wire:
                return
            self.answer()
            self.deliver()
        raise AssertionError("the feed never ends")


OPERATIONS = ["update", "code", "code", "code", "pump", "answer", "answer", "deliver", "deliver", "toggle"]


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.integers(1, 4),
    window=st.sampled_from([0, 15, 45, 100, 1000]),
    tensors=st.integers(0, 3),
    plan=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3)), max_size=120),
)
def test_a_guest_ends_at_the_replicas_version(
    pieces: int, window: int, tensors: int, plan: list[tuple[str, int]]
) -> None:
    world = World(pieces, window, tensors)
    for operation, number in plan:
        match operation:
            case "update":
                world.replica.update()
            case "code":
                world.replica.code(number % pieces)
                world.pump()
            case "pump":
                world.pump()
            case "answer":
                world.answer()
            case "deliver":
                world.deliver()
            case "toggle":
                world.feed.open = not world.feed.open
        if world.feed.current(world.replica.state):
            # Whatever is still on the wire, it leads there.
            assert world.parts == tensors
            assert not world.replica.asked
    world.drain()
    assert world.feed.current(world.replica.state)
    assert world.guest.have == [world.replica.version] * pieces
    assert len(world.guest.tensors) == tensors
    assert world.feed.in_flight_bytes == 0


def at(base: int, version: int) -> PieceState:
    return PieceState(base, version, CHANGE, WHOLE)


def opened(pieces: int, window: int = 1000) -> Feed:
    feed = Feed(pieces=pieces, window_bytes=window)
    feed.open = True
    return feed


def test_a_newcomer_gets_wholes_in_order_and_a_regular_gets_changes() -> None:
    feed, state = opened(3), [at(NOTHING, 7), at(NOTHING, 7), at(6, 7)]
    for index in range(3):
        item = feed.next(state)
        assert item == Item("whole", index, WHOLE)
        feed.asked(item)
        feed.answered(item, 7)
    assert feed.next(state) is None
    assert feed.current(state)
    state = [at(7, 8)] * 3
    assert not feed.current(state)
    assert feed.next(state) == Item("change", 0, CHANGE)


def test_who_missed_a_version_gets_the_piece_whole() -> None:
    feed = opened(1)
    feed.have = [3]
    assert feed.next([at(4, 5)]) == Item("whole", 0, WHOLE)
    assert feed.next([at(3, 5)]) == Item("change", 0, CHANGE)


def test_a_pending_piece_waits_for_its_whole() -> None:
    feed = opened(1)
    item = feed.next([at(NOTHING, 1)])
    assert item is not None
    feed.asked(item)
    for state in ([at(1, 2)], [at(NOTHING, 1)], [at(PENDING, 3)]):
        assert feed.next(state) is None
        assert not feed.current(state)
    feed.answered(item, 1)
    assert feed.next([at(1, 2)]) == Item("change", 0, CHANGE)


def test_changes_go_before_wholes() -> None:
    """Else the pieces that a newcomer already has would fall behind while the others arrive."""
    feed = opened(3)
    feed.have = [NOTHING, 4, NOTHING]
    assert feed.next([at(NOTHING, 5), at(4, 5), at(NOTHING, 5)]) == Item("change", 1, CHANGE)


def test_two_items_always_may_go_and_then_the_window_holds() -> None:
    """One at a time would leave a long link idle from the last byte of a piece until the guest's answer."""
    feed, state = opened(4, window=WHOLE // 2), [at(NOTHING, 1)] * 4
    for index in range(2):
        item = feed.next(state)
        assert item == Item("whole", index, WHOLE)
        feed.asked(item)
    assert feed.next(state) is None
    feed.taken(WHOLE - 1)
    assert feed.next(state) is None
    feed.taken(1)
    assert feed.next(state) == Item("whole", 2, WHOLE)


def test_samples_of_a_lease_use_the_same_credit() -> None:
    feed = opened(1, window=50)
    feed.have = [1]
    feed.extra(45)
    assert feed.next([at(1, 2)]) is None
    feed.taken(45)
    assert feed.next([at(1, 2)]) is not None


@pytest.mark.parametrize("claimed", [10**9, -1])
def test_a_guest_that_claims_to_have_taken_what_was_not_sent_is_found_out(claimed: int) -> None:
    feed = opened(1, window=50)
    feed.extra(20)
    with pytest.raises(WireError, match="20 were in flight"):
        feed.taken(claimed)
    assert feed.in_flight_bytes == 20


def test_a_guest_that_came_back_may_tell_of_one_message_of_before_but_not_again_and_again() -> None:
    feed = opened(1, window=50)
    feed.taken(40)
    assert feed.in_flight_bytes == 0
    with pytest.raises(WireError):
        feed.taken(40)


def test_nothing_flows_to_a_closed_feed() -> None:
    feed = Feed(pieces=1, window_bytes=100)
    feed.tensors.append(TensorPart("w", 0, 4, 16))
    assert feed.next([at(NOTHING, 1)]) is None
    feed.open = True
    assert feed.next([at(NOTHING, 1)]) == Item("tensor", 0, 16)


def test_fixed_tensors_go_first_and_count_until_they_are_on_the_wire() -> None:
    feed, state = opened(1), [at(NOTHING, 1)]
    feed.tensors.append(TensorPart("w", 0, 4, 16))
    item = feed.next(state)
    assert item == Item("tensor", 0, 16)
    feed.asked(item)
    whole = feed.next(state)
    assert whole is not None
    feed.asked(whole)
    feed.answered(whole, 1)
    assert not feed.current(state)
    feed.answered(item, 0)
    assert feed.current(state)


@pytest.mark.parametrize("state", [[], [at(NOTHING, NOTHING)]])
def test_nobody_is_current_before_there_is_a_replica(state: list[PieceState]) -> None:
    feed = opened(len(state))
    assert feed.next(state) is None
    assert not feed.current(state)
