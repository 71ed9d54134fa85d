"""The pending: never more than it holds, the crowd pays first, and whoever has spoken is left alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigError
from potluck.wire import files
from potluck.wire.files import WANTED_FILES, Room, connection_room, warning_of
from potluck.wire.pending import AcceptedConnection, Pending


def connection(descriptor: int, address: str = "10.0.0.1", since: float = 0.0) -> AcceptedConnection:
    return AcceptedConnection(descriptor=descriptor, address=address, port=1000 + descriptor, since=since)


def filled(count: int, *, most: int, address: str = "10.0.0.1") -> Pending:
    pending = Pending(most=most, stays_s=5.0)
    for number in range(count):
        pending.came(connection(number, address, since=number / 100))
    return pending


def test_whoever_fits_may_stay() -> None:
    pending = filled(10, most=10)
    assert pending.too_many(1.0) == []
    assert len(pending) == 10
    assert pending.closed == 0


def test_the_oldest_go_first() -> None:
    pending = filled(13, most=10)
    assert [v.descriptor for v in pending.too_many(1.0)] == [0, 1, 2]
    assert pending.too_many(1.0) == []
    assert (len(pending), pending.closed) == (10, 3)


def test_a_crowd_does_not_crowd_out_another_address() -> None:
    pending = Pending(most=10, stays_s=5.0)
    pending.came(connection(100, "10.0.0.9"))  # the oldest of all
    for number in range(30):
        pending.came(connection(number, since=1.0))
        pending.came(connection(100 + number % 2, "10.0.0.9"))  # its two connections, again and again
        assert all(v.address == "10.0.0.1" for v in pending.too_many(1.0))
    assert len(pending) == 10


def test_who_has_spoken_or_left_is_not_pending() -> None:
    pending = filled(10, most=5)
    for descriptor in (0, 1, 2, 3, 99):
        pending.left(descriptor)
    assert [v.descriptor for v in pending.too_many(1.0)] == [4]


def test_who_stays_longer_than_a_handshake_was_let_in() -> None:
    assert filled(10, most=5).too_many(5.045) == []
    pending = filled(10, most=3)
    assert [v.descriptor for v in pending.too_many(5.045)] == [5, 6]
    assert pending.closed == 2, "those whose time was over were not turned out"


def test_a_descriptor_that_came_again_is_the_new_one() -> None:
    pending = Pending(most=1, stays_s=5.0)
    pending.came(connection(7, "10.0.0.1"))
    pending.came(connection(7, "10.0.0.2"))
    pending.came(connection(8, "10.0.0.2"))
    assert [(v.descriptor, v.address) for v in pending.too_many(0.0)] == [(7, "10.0.0.2")]
    pending.left(8)
    pending.left(8)
    assert len(pending) == 0


@given(
    most=st.integers(1, 6),
    moves=st.lists(
        st.tuples(st.sampled_from(["came", "came", "came", "left", "turn"]), st.integers(0, 12), st.integers(0, 3)),
        max_size=60,
    ),
)
@settings(deadline=None)
def test_any_order_keeps_the_bound_and_the_books(most: int, moves: list[tuple[str, int, int]]) -> None:
    pending = Pending(most=most, stays_s=5.0)
    there: dict[int, str] = {}
    now = 0.0
    for what, descriptor, address in moves:
        now += 0.01
        if what == "came":
            pending.came(connection(descriptor, f"10.0.0.{address}", now))
            there.pop(descriptor, None)
            there[descriptor] = f"10.0.0.{address}"
        elif what == "left":
            pending.left(descriptor)
            there.pop(descriptor, None)
        else:
            for out in pending.too_many(now):
                crowds = Counter(there.values())
                assert crowds[out.address] == max(crowds.values())
                assert out.descriptor == next(d for d, a in there.items() if a == out.address)
                del there[out.descriptor]
            assert len(pending) <= most
        assert len(pending) == len(there)


# -- files


@pytest.mark.parametrize("in_use", [5, 60])
@pytest.mark.parametrize("limit", [None, WANTED_FILES, 2048, 1024, 512, 256])
def test_there_is_always_room_for_the_training(limit: int | None, in_use: int) -> None:
    room = connection_room(limit, in_use)
    if limit is not None:
        assert limit - in_use - room.waiting - room.inside - room.batch >= min(512, limit // 2)
    assert room.batch <= room.waiting
    assert room.inside >= 6
    warning = warning_of(limit, room)
    assert (warning is None) == (room == Room())
    assert warning is None or (str(limit) in warning and str(room.waiting) in warning)


@pytest.mark.parametrize(
    ("limit", "in_use", "words"), [(255, 0, "at least 256"), (64, 9, "64"), (1024, 460, "460")]
)
def test_a_host_does_not_listen_where_too_few_files_are_left(limit: int, in_use: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        connection_room(limit, in_use)
    assert "ulimit -n" in caught.value.hint


def test_who_makes_way_is_the_oldest_of_the_largest_crowd_and_has_had_its_time() -> None:
    pending = filled(10, most=10)  # one every hundredth of a second
    pending.came(connection(50, "10.0.0.9", since=0.0))
    assert [v.descriptor for v in pending.make_way(3, came_before=1.0)] == [0, 1, 2]
    assert [v.descriptor for v in pending.make_way(3, came_before=0.045)] == [3, 4]
    assert pending.make_way(3, came_before=0.045) == []
    assert (50 in pending, pending.closed) == (True, 5)
    assert len(pending.make_way(99, came_before=1.0)) == 6
    assert len(pending) == 0


class FakeLimits:
    """The module `resource` of a system with these limits."""

    RLIM_INFINITY = -1
    RLIMIT_NOFILE = 7

    def __init__(self, soft: int, hard: int, *, refuses: bool = False) -> None:
        self.limits, self._refuses = (soft, hard), refuses

    def getrlimit(self, kind: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, kind: int, limits: tuple[int, int]) -> None:
        if self._refuses:
            raise ValueError("not allowed to raise maximum limit")
        self.limits = limits


@pytest.mark.parametrize(
    ("limits", "now"),
    [
        (FakeLimits(1024, 1_048_576), WANTED_FILES),
        (FakeLimits(256, -1), WANTED_FILES),
        (FakeLimits(1024, 4096), 4096),
        (FakeLimits(65_536, 65_536), 65_536),
        (FakeLimits(-1, -1), None),
        (FakeLimits(1024, -1, refuses=True), 1024),
    ],
)
def test_the_soft_limit_is_raised_within_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, limits: FakeLimits, now: int | None
) -> None:
    hard = limits.limits[1]
    monkeypatch.setitem(__import__("sys").modules, "resource", limits)
    monkeypatch.setattr(files.sys, "platform", "linux")
    assert files.make_room() == now
    assert limits.limits[1] == hard
