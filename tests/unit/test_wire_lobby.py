"""The lobby: never more than it holds, the crowd pays first, and whoever has spoken is left alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigError
from potluck.wire import files
from potluck.wire.files import WANTED_FILES, Room, room_at_door, warning_of
from potluck.wire.lobby import Lobby, Visitor


def visitor(descriptor: int, address: str = "10.0.0.1", since: float = 0.0) -> Visitor:
    return Visitor(descriptor=descriptor, address=address, port=1000 + descriptor, since=since)


def filled(count: int, *, most: int, address: str = "10.0.0.1") -> Lobby:
    lobby = Lobby(most=most, stays_s=5.0)
    for number in range(count):
        lobby.came(visitor(number, address, since=number / 100))
    return lobby


def test_whoever_fits_may_stay() -> None:
    lobby = filled(10, most=10)
    assert lobby.too_many(1.0) == []
    assert len(lobby) == 10
    assert lobby.turned_out == 0


def test_the_oldest_go_first() -> None:
    lobby = filled(13, most=10)
    assert [v.descriptor for v in lobby.too_many(1.0)] == [0, 1, 2]
    assert lobby.too_many(1.0) == []
    assert (len(lobby), lobby.turned_out) == (10, 3)


def test_a_crowd_does_not_crowd_out_another_address() -> None:
    lobby = Lobby(most=10, stays_s=5.0)
    lobby.came(visitor(100, "10.0.0.9"))  # the oldest of all
    for number in range(30):
        lobby.came(visitor(number, since=1.0))
        lobby.came(visitor(100 + number % 2, "10.0.0.9"))  # its two connections, again and again
        assert all(v.address == "10.0.0.1" for v in lobby.too_many(1.0))
    assert len(lobby) == 10


def test_who_has_spoken_or_left_is_no_visitor() -> None:
    lobby = filled(10, most=5)
    for descriptor in (0, 1, 2, 3, 99):
        lobby.left(descriptor)
    assert [v.descriptor for v in lobby.too_many(1.0)] == [4]


def test_who_stays_longer_than_a_handshake_was_let_in() -> None:
    assert filled(10, most=5).too_many(5.045) == []
    lobby = filled(10, most=3)
    assert [v.descriptor for v in lobby.too_many(5.045)] == [5, 6]
    assert lobby.turned_out == 2, "those whose time was over were not turned out"


def test_a_descriptor_that_came_again_is_the_new_one() -> None:
    lobby = Lobby(most=1, stays_s=5.0)
    lobby.came(visitor(7, "10.0.0.1"))
    lobby.came(visitor(7, "10.0.0.2"))
    lobby.came(visitor(8, "10.0.0.2"))
    assert [(v.descriptor, v.address) for v in lobby.too_many(0.0)] == [(7, "10.0.0.2")]
    lobby.left(8)
    lobby.left(8)
    assert len(lobby) == 0


@given(
    most=st.integers(1, 6),
    moves=st.lists(
        st.tuples(st.sampled_from(["came", "came", "came", "left", "turn"]), st.integers(0, 12), st.integers(0, 3)),
        max_size=60,
    ),
)
@settings(deadline=None)
def test_any_order_keeps_the_bound_and_the_books(most: int, moves: list[tuple[str, int, int]]) -> None:
    lobby = Lobby(most=most, stays_s=5.0)
    there: dict[int, str] = {}
    now = 0.0
    for what, descriptor, address in moves:
        now += 0.01
        if what == "came":
            lobby.came(visitor(descriptor, f"10.0.0.{address}", now))
            there.pop(descriptor, None)
            there[descriptor] = f"10.0.0.{address}"
        elif what == "left":
            lobby.left(descriptor)
            there.pop(descriptor, None)
        else:
            for out in lobby.too_many(now):
                crowds = Counter(there.values())
                assert crowds[out.address] == max(crowds.values())
                assert out.descriptor == next(d for d, a in there.items() if a == out.address)
                del there[out.descriptor]
            assert len(lobby) <= most
        assert len(lobby) == len(there)


# -- files


@pytest.mark.parametrize("in_use", [5, 60])
@pytest.mark.parametrize("limit", [None, WANTED_FILES, 2048, 1024, 512, 256])
def test_there_is_always_room_for_the_training(limit: int | None, in_use: int) -> None:
    room = room_at_door(limit, in_use)
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
        room_at_door(limit, in_use)
    assert "ulimit -n" in caught.value.hint


def test_who_makes_way_is_the_oldest_of_the_largest_crowd_and_has_had_its_time() -> None:
    lobby = filled(10, most=10)  # one every hundredth of a second
    lobby.came(visitor(50, "10.0.0.9", since=0.0))
    assert [v.descriptor for v in lobby.make_way(3, came_before=1.0)] == [0, 1, 2]
    assert [v.descriptor for v in lobby.make_way(3, came_before=0.045)] == [3, 4]
    assert lobby.make_way(3, came_before=0.045) == []
    assert (50 in lobby, lobby.turned_out) == (True, 5)
    assert len(lobby.make_way(99, came_before=1.0)) == 6
    assert len(lobby) == 0


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
