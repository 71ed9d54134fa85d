"""Strangers at the port and other services behind a token: all told apart, and no guest notices."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils import garbage

from potluck.errors import NetworkError, RefusedError
from potluck.wire.keys import new_keys
from potluck.wire.reach import PortAnswer, who_answers
from potluck.wire.token import Token
from potluck.wire.transport import GuestSocket, HostSocket

KEYS = new_keys()


class Host:
    """A host in a thread that answers every message with its number of frames."""

    def __init__(self) -> None:
        self.denied: list[str] = []
        self.received = 0
        self.socket = HostSocket(bind="127.0.0.1", port=0, keys=KEYS, on_denied=self.denied.append)
        self.port = self.socket.port
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for peer, frames in self.socket.receive(5.0):
                self.received += 1
                self.socket.send(peer, [b"%d" % len(frames)])

    def close(self) -> None:
        self._stop = True
        self.socket.wake()
        self._thread.join(5)
        self.socket.close()


@pytest.fixture(scope="module", autouse=True)
def _memory_of_sent_frames_is_freed() -> None:
    """Start what pyzmq keeps for the whole process (a thread and a context), so that no test seems to leak it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    service = Host()
    yield service
    service.close()


def token(port: int) -> Token:
    return Token(addresses=("127.0.0.1",), port=port, host_public=KEYS.public, guest_secret=KEYS.guest_secret)


def raw(*parts: bytes) -> Callable[[int], None]:
    def attack(port: int) -> None:
        with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as stranger:
            stranger.settimeout(5)
            with contextlib.suppress(OSError):
                for part in parts:
                    stranger.sendall(part)
                while stranger.recv(1000):
                    pass

    return attack


def zeromq(**options: bytes) -> Callable[[int], None]:
    def attack(port: int) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.RECONNECT_IVL, -1)
            for name, value in options.items():
                stranger.setsockopt(getattr(zmq, name), value)
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):
                stranger.send_multipart([b"let", b"me", b"in"], zmq.NOBLOCK)
            assert monitor.poll(5000), "the stranger was not cut off"
            assert not stranger.poll(0)
            stranger.disable_monitor()

    return attack


OTHER = new_keys()
PAIR = {"CURVE_PUBLICKEY": OTHER.guest_public, "CURVE_SECRETKEY": OTHER.guest_secret}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
STRANGERS: dict[str, Callable[[int], None]] = {
    "http": raw(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "garbage": raw(b"\x00\x01\x02" + os.urandom(5000)),
    "almost a greeting": raw(b"\xff" + bytes(8) + b"\x7f" + b"x" * 200),
    "a greeting, then garbage": raw(GREETING, b"\x04\xff" + b"z" * 300),
    "a greeting, then a huge size": raw(GREETING, b"\x06" + (1 << 60).to_bytes(8, "big")),
    "zeromq without keys": zeromq(),
    "zeromq with a password": zeromq(PLAIN_USERNAME=b"root", PLAIN_PASSWORD=b"root"),
    "another guest's key": zeromq(CURVE_SERVERKEY=KEYS.public, **PAIR),
    "another host's key": zeromq(CURVE_SERVERKEY=OTHER.public, **PAIR),
}
TURN_AWAY_THEMSELVES = ("zeromq without keys", "zeromq with a password")


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_refused_and_reported_while_a_guest_goes_on(host: Host, name: str) -> None:
    guest = GuestSocket(token(host.port))
    guest.handshake(5)
    ask(guest)
    host.denied.clear()
    before = host.received
    for _ in range(3):
        STRANGERS[name](host.port)
        ask(guest)
    assert host.received == before + 3, "a stranger's message came through"
    deadline = time.monotonic() + (0.3 if name in TURN_AWAY_THEMSELVES else 5)
    while len(host.denied) < 3 and time.monotonic() < deadline:
        ask(guest)
    # Where both sides turn away, the stranger may be the first to hang up, which is not reported.
    assert len(host.denied) == 3 or (name in TURN_AWAY_THEMSELVES and len(host.denied) < 3)
    assert set(host.denied) <= {"127.0.0.1", "unknown"}
    assert guest.connected
    guest.close()


def ask(guest: GuestSocket) -> None:
    assert guest.send_control([b"a", b"b"])
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for channel, frames in guest.receive(0.5):
            assert (channel, bytes(frames[0])) == ("control", b"2")
            return
    raise AssertionError("the host did not answer")


def test_guests_that_look_come_and_go_are_not_reported(host: Host) -> None:
    host.denied.clear()
    for _ in range(5):
        guest = GuestSocket(token(host.port))
        guest.handshake(5)
        ask(guest)
        guest.close()
    time.sleep(0.2)
    assert host.denied == []


def test_a_crowd_of_strangers_does_not_keep_a_guest_out(host: Host) -> None:
    crowd = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(200)]
    try:
        guest = GuestSocket(token(host.port))
        guest.handshake(5)
        ask(guest)
        guest.close()
    finally:
        for stranger in crowd:
            stranger.close()


class Service:
    """Something else that listens: it sends `greeting` to who connects, and hangs up or not."""

    def __init__(self, greeting: bytes, close_at_once: bool) -> None:
        self._greeting, self._close_at_once = greeting, close_at_once
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                connection.sendall(self._greeting)
                if self._close_at_once:
                    connection.close()
                else:
                    self._open.append(connection)

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        for connection in [*self._open, self._listener]:
            connection.close()


@pytest.mark.parametrize(
    ("greeting", "close_at_once", "answer"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, PortAnswer.OTHER),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", True, PortAnswer.OTHER),
        (b"", False, PortAnswer.SILENT),
    ],
    ids=["ssh", "http", "silent"],
)
def test_another_service_behind_the_token_is_named_as_such(
    greeting: bytes, close_at_once: bool, answer: PortAnswer
) -> None:
    service = Service(greeting, close_at_once)
    guest = GuestSocket(token(service.port))
    try:
        with pytest.raises(NetworkError, match=f"no potluck host at 127.0.0.1 port {service.port}") as caught:
            guest.handshake(0.5)
        assert not isinstance(caught.value, RefusedError)
        assert answer.value in str(caught.value)
        assert caught.value.hint
    finally:
        guest.close()
        service.close()


def test_a_real_web_server_is_no_host() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        guest = GuestSocket(token(server.server_port))
        with pytest.raises(NetworkError, match="no potluck host"):
            guest.handshake(1.0)
        guest.close()
        server.shutdown()
        thread.join()


def test_a_zeromq_socket_without_keys_is_no_host() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        guest = GuestSocket(token(port))
        with pytest.raises(NetworkError, match="no potluck host"):
            guest.handshake(1.0)
        guest.close()


def test_who_answers_at_a_closed_port(host: Host) -> None:
    assert who_answers("127.0.0.1", host.port, 2.0) is PortAnswer.CURVE
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    assert who_answers("127.0.0.1", port, 1.0) is PortAnswer.NOTHING


def test_each_address_is_named_with_what_happened(host: Host) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        free = listener.getsockname()[1]
    refused = Token(
        addresses=("127.0.0.1", "no-such-name.invalid", "255.255.255.255"),
        port=free,
        host_public=KEYS.public,
        guest_secret=KEYS.guest_secret,
    )
    with pytest.raises(NetworkError) as caught:
        GuestSocket(refused, connect_timeout_s=3.0)
    text = str(caught.value)
    assert f"127.0.0.1 port {free}: refused" in text
    assert "no-such-name.invalid" in text
    assert "no machine of that name" in text
    assert f"255.255.255.255 port {free}: " in text
    assert "firewall" in caught.value.hint


def test_the_first_address_that_answers_is_taken(host: Host) -> None:
    several = Token(
        addresses=("255.255.255.255", "no-such-name.invalid", "localhost"),
        port=host.port,
        host_public=KEYS.public,
        guest_secret=KEYS.guest_secret,
    )
    guest = GuestSocket(several, connect_timeout_s=3.0)
    assert guest.address == "localhost"
    guest.handshake(5)
    ask(guest)
    guest.close()


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux drops what a full backlog cannot take")
def test_an_address_that_swallows_packets_is_given_up_at_the_deadline() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(socket.socket()))
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        where = listener.getsockname()
        for _ in range(3):
            filler = stack.enter_context(contextlib.closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(where)
        time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(NetworkError, match=r"no answer within 0\.4 s"):
            GuestSocket(token(where[1]), connect_timeout_s=0.4)
        assert time.monotonic() - began < 2
