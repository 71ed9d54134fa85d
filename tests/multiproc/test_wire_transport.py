"""The transport between two real sockets: messages, large frames, full queues, waking, ports, threads."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq
from zmq.utils import garbage

from potluck.errors import ConfigError, NetworkError, PortTakenError, RefusedError, WireError
from potluck.spec.messages import Frames, Message
from potluck.wire import transport
from potluck.wire.frames import MAX_FRAME_BYTES, MAX_FRAMES, Reader, Received, pack
from potluck.wire.keys import HostKeys, new_keys, public_of
from potluck.wire.token import Token
from potluck.wire.transport import GuestSocket, HostSocket

Handler = Callable[[bytes, list[memoryview]], None]


class Ping(Message, frozen=True, kw_only=True):
    kind = "ping"
    frames = Frames(most=MAX_FRAMES)
    n: int


PINGS = Reader([Ping])


def token_of(host: HostSocket, keys: HostKeys) -> Token:
    return Token(addresses=("127.0.0.1",), port=host.port, host_public=keys.public, guest_secret=keys.guest_secret)


class Echo:
    """A host in a thread that sends everything back."""

    def __init__(self) -> None:
        self.keys = new_keys()
        self.denied: list[str] = []
        self.peers: dict[bytes, str] = {}
        self.host = HostSocket(bind="127.0.0.1", port=0, keys=self.keys, on_denied=self.denied.append)
        self.token = token_of(self.host, self.keys)
        self.malformed = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for peer, frames in self.host.receive(5.0):
                self.peers[peer] = self.host.address_of(frames)
                try:
                    PINGS.read(frames)
                except WireError:
                    self.malformed += 1
                    continue
                self.host.send(peer, frames)

    def stop(self) -> bool:
        self._stop = True
        self.host.wake()
        self._thread.join(5)
        return not self._thread.is_alive()

    def close(self) -> None:
        assert self.stop()
        self.host.close()


@pytest.fixture(scope="module", autouse=True)
def _memory_of_sent_frames_is_freed() -> None:
    """Start what pyzmq keeps for the whole process (a thread and a context), so that no test seems to leak it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


@pytest.fixture
def echo() -> Iterator[Echo]:
    service = Echo()
    yield service
    service.close()


@pytest.fixture
def guest(echo: Echo) -> Iterator[GuestSocket]:
    member = GuestSocket(echo.token)
    member.handshake(5)
    yield member
    member.close()


def message(number: int, *frames: bytes | memoryview) -> list[bytes | memoryview]:
    return pack(Ping(n=number), frames)


def collect(member: GuestSocket, count: int, within_s: float = 10.0) -> list[tuple[str, Received[Ping]]]:
    deadline = time.monotonic() + within_s
    got: list[tuple[str, Received[Ping]]] = []
    while len(got) < count and time.monotonic() < deadline:
        got += [(channel, PINGS.read(frames)) for channel, frames in member.receive(0.2)]
    assert len(got) == count
    return got


def exchange(member: GuestSocket, number: int = 1) -> None:
    """One message there and back on each connection."""
    assert member.send_control(message(number))
    assert member.send_data(message(number, b"tensor"))
    got = dict(collect(member, 2))
    assert got["control"].message == Ping(n=number)
    assert bytes(got["data"].frames[0]) == b"tensor"


def test_messages_go_there_and_back_on_both_connections(echo: Echo, guest: GuestSocket) -> None:
    for number in range(50):
        exchange(guest, number)
    assert echo.peers == {guest.guest_id + b"c": "127.0.0.1", guest.guest_id + b"d": "127.0.0.1"}
    assert guest.address == "127.0.0.1"
    assert guest.connected
    assert echo.denied == []


@pytest.mark.parametrize("size", [8 * 1024 * 1024, MAX_FRAME_BYTES])
def test_large_frames_go_both_ways_unchanged(guest: GuestSocket, size: int) -> None:
    data = os.urandom(size)
    for _ in range(2):
        assert guest.send_data(message(1, memoryview(data), b"", memoryview(data)[:1000]))
    for _, got in collect(guest, 2):
        assert bytes(got.frames[0]) == data
        assert [len(frame) for frame in got.frames] == [size, 0, 1000]


def test_control_overtakes_data(guest: GuestSocket) -> None:
    data = bytes(8 * 1024 * 1024)
    for _ in range(8):
        assert guest.send_data(message(0, data))
    assert guest.send_control(message(7))
    order = [channel for channel, _ in collect(guest, 9)]
    assert order.index("control") < 8


def test_received_frames_are_not_copied(guest: GuestSocket) -> None:
    assert guest.send_data(message(1, bytes(1_000_000)))
    _, got = collect(guest, 1)[0]
    assert isinstance(got.frames[0], memoryview)
    assert isinstance(got.frames[0].obj, zmq.Frame)


def test_a_frame_above_the_limit_is_not_sent(echo: Echo, guest: GuestSocket) -> None:
    with pytest.raises(WireError, match="at most"):
        guest.send_data([bytes(MAX_FRAME_BYTES + 1)])
    exchange(guest)
    assert echo.stop()
    with pytest.raises(WireError, match="at most"):
        echo.host.send(guest.guest_id + b"d", [bytes(MAX_FRAME_BYTES + 1)])


def test_sending_never_waits_and_says_when_a_queue_is_full() -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    guest = None
    try:
        assert host.send(b"stranger!", [b"x"]) is False
        guest = connect_by_hand(host, keys)
        assert guest.send_data([b"here"])
        peer = receive_one(host)[0]
        payload = bytes(256 * 1024)
        slowest, accepted = 0.0, 0
        for _ in range(4 * transport.QUEUE_MESSAGES):
            began = time.monotonic()
            sent = host.send(peer, [payload])
            slowest = max(slowest, time.monotonic() - began)
            accepted += sent
            if not sent:
                break
        assert not sent
        assert accepted >= transport.QUEUE_MESSAGES
        assert slowest < 2.0
        while guest.send_data([payload]):
            pass
        received = 0
        while received < accepted:
            part = guest.receive(5.0)
            assert part
            received += len(part)
        assert host.send(peer, [payload])
    finally:
        if guest is not None:
            guest.close(linger_s=0)
        host.close(linger_s=0)


def connect_by_hand(host: HostSocket, keys: HostKeys) -> GuestSocket:
    """A guest of a host that has no thread: the host must receive() while the guest shakes hands."""
    guest = GuestSocket(token_of(host, keys))
    done = threading.Event()
    thread = threading.Thread(target=lambda: (guest.handshake(5), done.set()))
    thread.start()
    while thread.is_alive():
        assert host.receive(0.01) == []
    thread.join()
    assert done.is_set()
    return guest


def receive_some(host: HostSocket, count: int) -> list[tuple[bytes, list[memoryview]]]:
    """So many messages; several may come at once."""
    deadline, came = time.monotonic() + 15, []
    while len(came) < count and time.monotonic() < deadline:
        came += host.receive(0.2)
    assert len(came) == count, f"{len(came)} came"
    return came


def receive_one(host: HostSocket) -> tuple[bytes, list[memoryview]]:
    return receive_some(host, 1)[0]


def test_a_guest_that_left_cannot_be_sent_to_and_one_that_comes_back_has_a_new_name(echo: Echo) -> None:
    names = set()
    for _ in range(2):
        guest = GuestSocket(echo.token)
        guest.handshake(5)
        exchange(guest)
        names.add(guest.guest_id)
        guest.close()
    assert len(names) == 2
    assert echo.stop()
    deadline = time.monotonic() + 5
    gone = next(iter(names)) + b"c"
    while echo.host.send(gone, [b"x"]) and time.monotonic() < deadline:
        echo.host.receive(0.01)
    assert echo.host.send(gone, [b"x"]) is False


def test_the_last_words_of_a_host_arrive_and_then_the_guest_knows() -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    guest = connect_by_hand(host, keys)
    assert guest.send_control([b"hello"])
    peer, _ = receive_one(host)
    for number in range(40):
        assert host.send(peer, [b"last", bytes([number])])
    host.close()
    time.sleep(0.1)
    words: list[bytes] = []
    deadline = time.monotonic() + 5
    while (guest.connected or len(words) < 40) and time.monotonic() < deadline:
        words += [bytes(frames[1]) for _, frames in guest.receive(1.0)]
    assert words == [bytes([number]) for number in range(40)]
    assert not guest.connected
    assert guest.send_control([b"x"]) is False
    assert guest.send_data([b"x"]) is False
    began = time.monotonic()
    guest.close(linger_s=5.0)
    assert time.monotonic() - began < 4


def test_what_a_guest_said_before_it_left_arrives() -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    guest = connect_by_hand(host, keys)
    assert guest.send_data([bytes(4_000_000)])
    assert guest.send_control([b"bye"])
    threading.Thread(target=guest.close, kwargs={"linger_s": 5.0}).start()
    sizes = sorted(len(frames[0]) for _, frames in receive_some(host, 2))
    assert sizes == [3, 4_000_000]
    host.close()


@pytest.mark.parametrize("before", [True, False])
def test_waking_ends_the_wait_of_host_and_guest(echo: Echo, guest: GuestSocket, before: bool) -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    for waiting in (host, guest):
        if before:
            waiting.wake()
            waiting.wake()
        else:
            threading.Timer(0.1, waiting.wake).start()
        began = time.monotonic()
        assert waiting.receive(20.0) == []
        assert time.monotonic() - began < 5
        began = time.monotonic()
        assert waiting.receive(0.05) == []
        assert time.monotonic() - began >= 0.04
    host.close()
    host.wake()
    host.close()


def test_use_by_two_threads_at_once_is_an_exception(echo: Echo, guest: GuestSocket) -> None:
    time.sleep(0.1)  # the host's thread waits in receive()
    for use in (lambda: echo.host.send(b"x", [b""]), lambda: echo.host.receive(0), echo.host.close):
        with pytest.raises(RuntimeError, match="two threads"):
            use()
    exchange(guest)


def test_waking_from_many_threads_does_no_harm(guest: GuestSocket) -> None:
    stop = threading.Event()

    def pester() -> None:
        while not stop.is_set():
            guest.wake()

    threads = [threading.Thread(target=pester) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(30):
            exchange(guest, number)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_taken_port_names_who_holds_it(echo: Echo) -> None:
    with pytest.raises(PortTakenError, match=rf"port {echo.host.port} is taken by .*process {os.getpid()}"):
        HostSocket(bind="127.0.0.1", port=echo.host.port, keys=new_keys())


@pytest.mark.parametrize(("bind", "port"), [("203.0.113.77", 0), ("no-such-name", 0), ("0.0.0.0", 70000)])
def test_where_a_host_cannot_listen_is_a_clear_error(bind: str, port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        HostSocket(bind=bind, port=port, keys=new_keys())
    assert caught.value.hint


def test_the_port_is_free_at_once_after_close() -> None:
    port = 0
    keys = new_keys()
    for _ in range(3):
        host = HostSocket(bind="127.0.0.1", port=port, keys=keys)
        port = host.port
        guest = connect_by_hand(host, keys)
        assert guest.send_control([b"hello"])
        peer, _ = receive_one(host)
        assert host.send(peer, [b"hello"])
        host.close()
        with contextlib.closing(socket.socket()) as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
        guest.close()


@pytest.mark.skipif(os.name != "posix", reason="Windows counts handles, not descriptors")
def test_no_thread_and_no_descriptor_is_left() -> None:
    def once() -> None:
        service = Echo()
        member = GuestSocket(service.token)
        member.handshake(5)
        assert member.send_data(message(1, bytes(1_000_000)))
        collect(member, 1)
        member.close()
        service.close()
        with pytest.raises(NetworkError):
            GuestSocket(service.token, connect_timeout_s=0.5)
        with pytest.raises(ConfigError):
            HostSocket(bind="203.0.113.77", port=0, keys=new_keys())

    once()
    process = psutil.Process()
    before = process.num_threads(), process.num_fds(), len(threading.enumerate())
    for _ in range(3):
        once()
    deadline = time.monotonic() + 5.0
    while True:
        after = process.num_threads(), process.num_fds(), len(threading.enumerate())
        # Not more: a thread of an earlier test may have ended meanwhile, or one of a library may be about to.
        if all(now <= then for now, then in zip(after, before)):
            break
        assert time.monotonic() < deadline, (after, before)
        time.sleep(0.05)


def test_sockets_that_nobody_closed_end_with_their_owner() -> None:
    """In a cycle, as in the traceback of an exception; pyzmq alone would wait forever here."""
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    guest = connect_by_hand(host, keys)
    port = host.port
    cycle: list[object] = [host, guest]
    cycle.append(cycle)
    del host, guest, cycle
    gc.collect()
    HostSocket(bind="127.0.0.1", port=port, keys=keys).close()


def test_a_second_connection_of_the_same_name_is_ignored(echo: Echo, guest: GuestSocket) -> None:
    exchange(guest)
    with contextlib.ExitStack() as stack:
        raw = raw_guest(echo, stack, guest.guest_id + b"c")
        raw.send_multipart(message(3))
        assert not raw.poll(300)
    exchange(guest, 2)


def raw_guest(echo: Echo, stack: contextlib.ExitStack, name: bytes) -> Any:
    """A holder of the token that keeps to no limits."""
    context = stack.enter_context(zmq.Context())
    raw = stack.enter_context(context.socket(zmq.DEALER))
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.ROUTING_ID, name)
    raw.setsockopt(zmq.CURVE_SERVERKEY, echo.keys.public)
    raw.setsockopt(zmq.CURVE_PUBLICKEY, public_of(echo.keys.guest_secret))
    raw.setsockopt(zmq.CURVE_SECRETKEY, echo.keys.guest_secret)
    raw.connect(f"tcp://127.0.0.1:{echo.host.port}")
    return raw


def test_a_guest_beyond_the_limits_is_cut_off_or_refused_and_the_others_go_on(
    echo: Echo, guest: GuestSocket
) -> None:
    with contextlib.ExitStack() as stack:
        raw = raw_guest(echo, stack, b"rogue")
        raw.send_multipart([*message(1), *[b"x"] * (MAX_FRAMES + 500)])
        deadline = time.monotonic() + 5
        while not echo.malformed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert echo.malformed == 1
        monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.send_multipart([*message(1), bytes(MAX_FRAME_BYTES + 4096)])
        assert monitor.poll(5000)
        exchange(guest)
        raw.disable_monitor()
    exchange(guest, 2)


def test_a_token_without_the_right_keys_is_refused(echo: Echo, guest: GuestSocket) -> None:
    other = new_keys()
    for change in ({"guest_secret": other.guest_secret}, {"host_public": other.public}):
        stranger = GuestSocket(dataclasses.replace(echo.token, **change))
        began = time.monotonic()
        with pytest.raises(RefusedError, match=f"127.0.0.1 port {echo.host.port}") as caught:
            stranger.handshake(5)
        assert time.monotonic() - began < 3
        assert "token" in caught.value.hint
        assert stranger.send_control([b"x"]) is False
        stranger.close()
        exchange(guest)


def test_a_host_that_goes_away_during_the_handshake_is_named() -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    guest = GuestSocket(token_of(host, keys))
    host.close()
    with pytest.raises(NetworkError, match="closed the connection") as caught:
        guest.handshake(3)
    assert not isinstance(caught.value, RefusedError)
    guest.close()


def test_a_host_that_does_not_serve_its_port_is_named_after_the_deadline() -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    guest = GuestSocket(token_of(host, keys))
    with pytest.raises(NetworkError, match="did not finish the handshake") as caught:
        guest.handshake(0.3)
    assert not isinstance(caught.value, RefusedError)
    guest.close()
    host.close()
