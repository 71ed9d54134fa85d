"""The bare connection between two ranks: all bytes in order, both ways at once, and no waiting without end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from potluck.dist.streams import Closed, Door, Stream, follow

MIB = 1 << 20


class Enough(Exception):
    """Who waits gives up."""


def patience(times: int) -> Callable[[], None]:
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked >= times:
            raise Enough

    return ask


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    door = Door("127.0.0.1", b"t" * 16)
    guest = follow("127.0.0.1", door.invitation)
    host = door.admit()
    door.close()
    assert host is not None
    assert guest is not None
    yield host, guest
    host.close()
    guest.close()


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_both_send_more_than_the_system_holds_before_either_receives(pair: tuple[Stream, Stream]) -> None:
    size = 24 * MIB
    sent = [bytes([number]) * size for number in (1, 2)]
    got = [bytearray(size), bytearray(size)]

    def run(number: int) -> None:
        stream = pair[number]
        for at in range(0, size, MIB):
            stream.push(memoryview(sent[number])[at : at + MIB])
        stream.pull(memoryview(got[number]), patience(200))
        stream.flush(patience(200))

    threads = [in_thread(lambda number=number: run(number)) for number in (0, 1)]
    for thread in threads:
        thread.join(30)
    assert got[0] == sent[1]
    assert got[1] == sent[0]


def test_what_is_pulled_in_parts_comes_in_order(pair: tuple[Stream, Stream]) -> None:
    one, two = pair
    whole = bytes(range(256)) * 100
    one.push(memoryview(whole))
    one.push(memoryview(b""))
    found = b""
    for size in (1, 0, 999, 20_000, len(whole) - 21_000):
        room = two.room(size)
        two.pull(room, patience(100))
        found += bytes(room)
    assert found == whole


def test_who_waits_is_asked_and_may_give_up(pair: tuple[Stream, Stream]) -> None:
    with pytest.raises(Enough):
        pair[0].pull(memoryview(bytearray(1)), patience(2))
    pair[0].push(memoryview(bytes(64 * MIB)))
    with pytest.raises(Enough):
        pair[0].flush(patience(2))


def test_the_end_of_the_other_is_noticed(pair: tuple[Stream, Stream]) -> None:
    one, two = pair
    two.push(memoryview(b"last"))
    two.close()
    room = bytearray(4)
    one.pull(memoryview(room), patience(50))
    assert room == b"last"
    with pytest.raises(Closed):
        one.pull(memoryview(bytearray(1)), patience(50))

    def send() -> None:
        one.push(memoryview(bytes(16 * MIB)))
        one.flush(patience(50))

    with pytest.raises(Closed):
        send()


def test_strangers_are_not_taken_for_the_one_who_was_invited() -> None:
    door = Door("127.0.0.1", b"right" + bytes(11))
    port = int.from_bytes(door.invitation[:2], "little")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    strangers[0].sendall(b"wrong" + bytes(11))
    strangers[1].close()
    guest = follow("127.0.0.1", door.invitation)
    host = door.admit()
    assert guest is not None
    assert host is not None
    guest.push(memoryview(b"it is me"))
    room = bytearray(8)
    host.pull(memoryview(room), patience(50))
    assert room == b"it is me"
    strangers[0].settimeout(5)
    assert strangers[0].recv(1) == b"", "a stranger was kept"
    for each in (door, guest, host, strangers[0]):
        each.close()


def test_a_door_that_cannot_be_reached_is_no_error() -> None:
    door = Door("127.0.0.1", b"t" * 16)
    door.close()
    assert follow("127.0.0.1", door.invitation) is None
    assert follow("127.0.0.1", b"nonsense") is None
    assert Door.open("192.0.2.1", b"t" * 16) is None, "an address that this machine has not"
