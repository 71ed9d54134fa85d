"""What a holder of the token can take from a host is bounded: connections, and bytes of an endless message."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq
from zmq.utils import garbage, z85

from potluck.wire import transport
from potluck.wire.files import Room
from potluck.wire.frames import PART_BYTES
from potluck.wire.keys import new_keys
from potluck.wire.token import Token
from potluck.wire.transport import GuestSocket, HostSocket

KEYS = new_keys()
MB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _memory_of_sent_frames_is_freed() -> None:
    """Start what pyzmq keeps for the whole process, so that no test seems to leak it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


@contextlib.contextmanager
def host(bind: str = "127.0.0.1") -> Iterator[tuple[HostSocket, list[int]]]:
    """A host that receives in a thread, and the sizes of the messages that it was given."""
    end = HostSocket(bind=bind, port=0, keys=KEYS)
    sizes: list[int] = []
    over = threading.Event()

    def receive() -> None:
        while not over.is_set():
            for peer, frames in end.receive(0.05):
                sizes.append(sum(frame.nbytes for frame in frames))
                end.send(peer, [b"yes"])

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield end, sizes
    finally:
        over.set()
        thread.join(10)
        end.close()


def guest_of(end: HostSocket, address: str = "127.0.0.1") -> GuestSocket:
    token = Token(addresses=(address,), port=end.port, host_public=KEYS.public, guest_secret=KEYS.guest_secret)
    guest = GuestSocket(token, connect_timeout_s=10)
    guest.handshake(10)
    return guest


def is_answered(guest: GuestSocket) -> bool:
    deadline = time.monotonic() + 10
    if not guest.send_control([b"PLK?"]):
        return False
    while guest.connected and time.monotonic() < deadline:
        if guest.receive(0.2):
            return True
    return False


@contextlib.contextmanager
def rogues() -> Iterator[Callable[[HostSocket], zmq.Socket[bytes]]]:
    """Makes bare sockets that hold the key and keep to no rule."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(end: HostSocket) -> zmq.Socket[bytes]:
        rogue = context.socket(zmq.DEALER)
        rogue.setsockopt(zmq.LINGER, 0)
        rogue.setsockopt(zmq.RECONNECT_IVL, -1)
        rogue.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(8))
        rogue.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(KEYS.public))
        rogue.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(KEYS.guest_public))
        rogue.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(KEYS.guest_secret))
        rogue.connect(f"tcp://127.0.0.1:{end.port}")
        return rogue

    try:
        yield connect
    finally:
        context.destroy(linger=0)


def until(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():  # asked once where it holds: it may send something
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much has come over a connection")
def test_a_message_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_UNREAD_BYTES", 8 * MB)
    monkeypatch.setattr(transport, "LOOK_S", 0.02)
    size = 400 * MB
    with host() as (end, sizes), rogues() as rogue_of:
        guest = guest_of(end)
        rogue = rogue_of(end)
        gone = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        process = psutil.Process()
        before = process.memory_info().rss
        part = bytes(PART_BYTES)
        for _ in range(size // PART_BYTES):
            rogue.send(part, zmq.SNDMORE, copy=False)
        rogue.send(b"the end")
        most = before

        def is_cut_off() -> bool:
            nonlocal most
            most = max(most, process.memory_info().rss)
            return bool(gone.poll(1))

        assert until(is_cut_off), "it may send without an end"
        assert sizes == [] or max(sizes) < MB, "all of it was taken"
        assert most - before < size // 2
        assert is_answered(guest)
        guest.close()
        rogue.disable_monitor()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much has come over a connection")
def test_a_guest_that_sends_much_in_messages_that_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_UNREAD_BYTES", 8 * MB)
    monkeypatch.setattr(transport, "LOOK_S", 0.001)
    with host() as (end, sizes):
        guest = guest_of(end)
        payload, count = bytes(4 * MB), 30
        for _ in range(count):
            assert until(lambda: guest.send_data([b"PLK", payload]) or not guest.connected)
            assert guest.connected
        assert until(lambda: len([size for size in sizes if size > MB]) == count)
        guest.receive(0.1)
        assert guest.connected
        guest.close()


def test_connections_of_one_who_holds_the_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "connection_room", lambda limit, in_use: Room(inside=12))
    with host() as (end, _), rogues() as rogue_of:
        guest = guest_of(end)
        inside = end._auth.watch._inside
        ends = []
        for number in range(30):
            ends.append(rogue_of(end))
            ends[-1].send(b"here I am")
            ends[-1].poll(20 if number >= 10 else 5000)
        assert until(lambda: len(inside) <= 12), f"{len(inside)} connections are held"
        answering = [one for one in ends if one.poll(0)]
        assert len(answering) >= 10
        assert is_answered(guest), "the guest had to go for the others"
        guest.close()


def test_what_waits_for_those_who_never_read_is_bounded_for_all_of_them_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "budget_bytes", lambda memory: 16 * MB)
    end = HostSocket(bind="127.0.0.1", port=0, keys=KEYS)
    over = threading.Event()
    sizes: list[int] = []
    with rogues() as rogue_of:
        silent = [rogue_of(end) for _ in range(8)]
        for one in silent:
            one.setsockopt(zmq.RCVHWM, 1)
            one.send(b"here I am")
        there: set[bytes] = set()
        assert until(lambda: there.update(peer for peer, _ in end.receive(0.05)) or len(there) == 8)
        helper = threading.Thread(target=lambda: _reads(end, over, sizes))
        helper.start()
        reader = b""
        while not reader:
            reader = next((peer for peer, _ in end.receive(0.05) if peer not in there), b"")
        process = psutil.Process()
        before = most = process.memory_info().rss
        out: set[bytes] = set()
        sent = 0

        def all_came() -> bool:
            return end.receive(0.01) == [] and len(sizes) == sent

        for _ in range(60):
            for peer in [*there - out, reader]:
                sent += end.send(peer, [b"PLK", bytes(MB)]) and peer == reader
            out |= {peer for peer, _ in end.overfull()}
            most = max(most, process.memory_info().rss)
            assert end._queued.total_bytes <= 16 * MB
            assert until(all_came), "its messages did not come"
        assert out
        assert out <= there, "the one who reads had to go"
        assert most - before < 200 * MB, "480 MB were sent to those who never read"
        gone = next(iter(out))
        assert until(lambda: end.receive(0.01) == [] and not end.send(gone, [b"PLK"])), "it was not closed"
        over.set()
        helper.join(10)
    end.close()


def _reads(end: HostSocket, over: threading.Event, sizes: list[int]) -> None:
    """A guest that reads all that it is sent."""
    guest = guest_of(end)
    guest.send_data([b"PLK?"])
    while not over.is_set():
        sizes += [sum(frame.nbytes for frame in frames) for _, frames in guest.receive(0.05)]
    guest.close()


def test_an_ipv6_connection_is_known_by_its_address() -> None:
    try:
        with host("::1") as (end, _):
            guest = guest_of(end, "::1")
            inside = end._auth.watch._inside
            assert until(lambda: len(inside) == 2)
            assert {c.accepted.address for c in inside._connections.values()} == {"::1"}
            assert is_answered(guest)
            guest.close()
    except Exception as error:
        if "has no address" in str(error) or "no route" in str(error).lower():
            pytest.skip("no IPv6 here")
        raise
