"""A connection of its own between two ranks, in the clear and encrypted: all bytes in order, both ways at once, no
waiting without end, and nobody between the two."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from potluck.dist.sealing import _context, seal
from potluck.dist.streams import CONNECT_S, MOST_WAITING, Stream, StreamClosed, StreamListener, connect

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


SECRET = bytes(range(32))


def connected(listener: StreamListener, *, sealed: bool) -> tuple[Stream | None, Stream | None]:
    """Both ends, each as its rank gets it."""
    pending = connect("127.0.0.1", listener.offer)
    assert pending is not None
    with ThreadPoolExecutor(1) as other:
        entering = other.submit(pending.finish, sealed=sealed)
        return listener.accept(sealed=sealed), entering.result()


@pytest.fixture(params=[False, True], ids=["clear", "sealed"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Stream, Stream]]:
    listener = StreamListener("127.0.0.1", SECRET)
    host, guest = connected(listener, sealed=request.param)
    listener.close()
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
        room = two.buffer(size)
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
    with pytest.raises(StreamClosed):
        one.pull(memoryview(bytearray(1)), patience(50))

    def send() -> None:
        one.push(memoryview(bytes(16 * MIB)))
        one.flush(patience(50))

    with pytest.raises(StreamClosed):
        send()


class ClosedMeanwhile:
    """A connection that another thread closes while this one is in the midst of a call, which then says `last`."""

    def __init__(self, stream: Stream, last: Exception | None) -> None:
        self._stream, self._real, self._last = stream, stream._connection, last

    def send(self, part: memoryview) -> int:
        return self._end(len(part))

    def recv_into(self, room: memoryview) -> int:
        return self._end(len(room))

    def _end(self, count: int) -> int:
        self._stream._connection = self._real
        self._stream.close()
        if self._last is not None:
            raise self._last
        return count


@pytest.mark.parametrize("last", [None, ValueError("unwrapped"), AttributeError("None has no read"), OSError()])
@pytest.mark.parametrize("sends", [True, False])
def test_who_is_in_the_midst_when_another_thread_closes_is_told_that(sends: bool, last: Exception | None) -> None:
    one, two = socket.create_server(("127.0.0.1", 0)), socket.socket()
    two.connect(one.getsockname())
    stream = Stream(two)
    stream._connection = ClosedMeanwhile(stream, last)  # type: ignore[assignment]

    def work() -> None:
        if sends:
            stream.push(memoryview(bytes(MIB)))
            stream.flush(patience(3))
        else:
            stream.pull(memoryview(bytearray(MIB)), patience(3))

    with pytest.raises(StreamClosed):
        work()
    one.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_strangers_are_not_taken_for_the_other_rank(sealed: bool) -> None:
    listener = StreamListener("127.0.0.1", SECRET)
    port = int.from_bytes(listener.offer[:2], "little")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    strangers[0].sendall(b"wrong" + bytes(11))
    strangers[1].close()
    host, guest = connected(listener, sealed=sealed)
    assert guest is not None
    assert host is not None
    guest.push(memoryview(b"it is me"))
    room = bytearray(8)
    host.pull(memoryview(room), patience(50))
    assert room == b"it is me"
    strangers[0].settimeout(5)
    assert strangers[0].recv(1) == b"", "a stranger was kept"
    for each in (listener, guest, host, strangers[0]):
        each.close()


@pytest.mark.parametrize("count", [20, 3 * MOST_WAITING])
def test_silent_strangers_do_not_keep_the_other_rank_out(count: int) -> None:
    listener = StreamListener("127.0.0.1", SECRET)
    port = int.from_bytes(listener.offer[:2], "little")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    began = time.monotonic()
    host, guest = connected(listener, sealed=True)
    assert host is not None
    assert guest is not None
    assert time.monotonic() - began < CONNECT_S / 2
    for each in (listener, guest, host, *strangers):
        each.close()


def test_no_more_than_some_wait_at_a_listener() -> None:
    listener = StreamListener("127.0.0.1", SECRET)
    port = int.from_bytes(listener.offer[:2], "little")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_WAITING + 10)]
    for stranger in strangers[:10]:
        stranger.settimeout(5)
        assert stranger.recv(1) == b"", "the oldest was kept"
    assert len(listener._waiting) <= MOST_WAITING
    for each in (listener, *strangers):
        each.close()


def test_a_listener_that_cannot_be_reached_is_no_error() -> None:
    listener = StreamListener("127.0.0.1", SECRET)
    listener.close()
    assert connect("127.0.0.1", listener.offer) is None
    assert connect("127.0.0.1", b"nonsense") is None
    assert StreamListener.open("192.0.2.1", SECRET) is None, "an address that this machine has not"


# -- encrypted


class Wire:
    """Somebody on the way from one rank to the other: passes everything on, and keeps it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.seen = self._listener.getsockname()[1], bytearray()
        self._target = target
        in_thread(self._run)

    def _run(self) -> None:
        one, _ = self._listener.accept()
        two = socket.create_connection(self._target)
        in_thread(lambda: self._pass(two, one))
        self._pass(one, two)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)


@pytest.mark.parametrize("sealed", [False, True])
def test_who_listens_on_the_way_reads_nothing_of_what_is_sealed(sealed: bool) -> None:
    listener = StreamListener("127.0.0.1", SECRET)
    wire = Wire(("127.0.0.1", int.from_bytes(listener.offer[:2], "little")))
    listener.offer = wire.port.to_bytes(2, "little") + SECRET
    host, guest = connected(listener, sealed=sealed)
    assert host is not None
    assert guest is not None
    text = b"the gradients of a secret model" * 100
    guest.push(memoryview(text))
    room = bytearray(len(text))
    host.pull(memoryview(room), patience(50))
    assert room == text
    assert len(wire.seen) > len(text)
    assert (text[:31] in wire.seen) is not sealed
    assert SECRET not in wire.seen
    for each in (listener, guest, host):
        each.close()


def sealing(secrets: tuple[bytes, bytes], *sockets: socket.socket) -> list[str]:
    """What became of both ends of a connection, or of two, the first end of each being who was called."""
    with ThreadPoolExecutor(2) as both:
        ends = [
            both.submit(seal, each, secret, server=server, within_s=5.0)
            for each, secret, server in zip(sockets, secrets, (True, False), strict=True)
        ]
        told = []
        for end in ends:
            try:
                end.result().close()
                told.append("sealed")
            except OSError as error:
                told.append(str(error))
        return told


def test_who_does_not_know_the_secret_gets_no_further() -> None:
    told = sealing((SECRET, bytes(32)), *socket.socketpair())
    assert told[0] == "the other end does not know the secret"
    assert "sealed" not in told


WEAK_GROUP = """-----BEGIN DH PARAMETERS-----
MIGHAoGBAKwH7mLaaK2cfBBK5bWFJ0VdLoQtN/5PZWRaKeXITvHLNXJTRLAEX42A
gG3vugr9f2AAcam0CIDVtg/Ia7LOxVlAShQ3vOyptNulfq8Xi/V5kPD97JZzPdkM
Y1QSQUmoDT4zaR5i3Gyogr330kUo0aOWFTkARQE2TojOs31gRNRHAgEC
-----END DH PARAMETERS-----
"""
"""Of 1024 bits."""


def other_context(server: bool, ciphers: str, curve: str | None, weak: Path) -> ssl.SSLContext:
    """One that takes a handshake which ranks do not make."""
    context = _context(server)
    context.set_ciphers(f"{ciphers}:@SECLEVEL=0")
    if curve is not None:
        context.set_ecdh_curve(curve)
    if server and curve is None:
        weak.write_text(WEAK_GROUP, encoding="ascii")
        context.load_dh_params(weak)
    return context


@pytest.mark.parametrize("server", [True, False], ids=["called", "calling"])
@pytest.mark.parametrize(
    ("ciphers", "curve"),
    [
        ("ADH-AES128-GCM-SHA256", None),
        ("ECDHE-ECDSA-AES128-GCM-SHA256", "secp384r1"),
        ("AECDH-AES128-SHA", "prime256v1"),
        ("ECDHE-ECDSA-AES128-SHA256", "prime256v1"),
    ],
    ids=["a group of its own", "another curve", "no certificate", "another cipher"],
)
def test_one_curve_and_one_kind_of_cipher_are_taken_and_no_other(
    server: bool, ciphers: str, curve: str | None, tmp_path: Path
) -> None:
    """Even by who knows the secret."""
    mine, theirs = socket.socketpair()
    told: list[str] = []
    context = other_context(server, ciphers, curve, tmp_path / "weak.pem")

    def other() -> None:
        theirs.settimeout(5)
        try:
            with context.wrap_socket(theirs, server_side=server) as line:
                told.append(f"a handshake with {line.cipher()}")
        except OSError as error:
            told.append(type(error).__name__)

    thread = in_thread(other)
    with pytest.raises(OSError):
        seal(mine, SECRET, server=not server, within_s=5.0)
    thread.join(10)
    assert "handshake with" not in told[0]


def test_two_handshakes_of_one_in_the_middle_are_not_one() -> None:
    """It passes the proofs on, which it cannot make: each fits another handshake."""
    (called, to_called), (to_caller, caller) = socket.socketpair(), socket.socketpair()
    for each in (to_called, to_caller):
        each.settimeout(5)

    def between() -> None:
        with contextlib.suppress(OSError):
            as_caller = _context(server=False).wrap_socket(to_called)
            as_called = _context(server=True).wrap_socket(to_caller, server_side=True)
            as_caller.sendall(as_called.recv(32))
            as_called.sendall(as_caller.recv(32))

    in_thread(between)
    told = sealing((SECRET, SECRET), called, caller)
    assert told[0] == "the other end does not know the secret"
    assert "sealed" not in told


def test_a_proof_that_comes_byte_by_byte_is_not_waited_for_without_end() -> None:
    called, caller = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            sealed = _context(server=False).wrap_socket(caller)
            while not stop.wait(0.3):
                sealed.send(b"x")

    in_thread(trickle)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"timed out|does not know"):
        seal(called, SECRET, server=True, within_s=1.0)
    assert time.monotonic() - began < 5
    stop.set()


def test_where_openssl_cannot_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the ranks go by ZeroMQ."""
    monkeypatch.setattr("potluck.dist.sealing._CIPHERS", "NO-SUCH-CIPHER")
    listener = StreamListener("127.0.0.1", SECRET)
    assert connected(listener, sealed=True) == (None, None)
    listener.close()
