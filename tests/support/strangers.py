"""Strangers at a host's port: every way to knock without the token, and crowds that hold connections open.

It knows ZMTP's bytes and a host's public key, which a stranger may have come by; never the guests' key. Whoever
knocks looks whether it was let in: by the READY that ends a handshake, or by libzmq's own word.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq
from zmq.utils import z85

from potluck.spec.messages import HelloMessage, LeaveMessage
from potluck.wire.frames import pack
from potluck.wire.keys import new_keys
from potluck.wire.token import Token
from potluck.wire.transport import GuestSocket
from support.processes import SOURCE

ACCEPTED, CLOSED, STAYED = "accepted", "closed", "held the line"
"""What becomes of a stranger: let in, turned away, or neither until it left by itself."""

PATIENCE_S = 0.3
"""How long a stranger waits to be let in."""
_READY = b"\x05READY"
TESTS = Path(__file__).resolve().parents[1]


def greeting(mechanism: bytes = b"CURVE", *, major: int = 3, server: bool = False) -> bytes:
    """The 64 bytes with which ZMTP 3 begins."""
    return (
        b"\xff" + bytes(8) + b"\x7f" + bytes([major, 0]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)
    )


def command(name: bytes, body: bytes) -> bytes:
    """A ZMTP command frame."""
    content = bytes([len(name)]) + name + body
    size = len(content)
    return (b"\x04" + bytes([size]) if size < 256 else b"\x06" + size.to_bytes(8, "big")) + content


def a_frame_of(size: int) -> bytes:
    """The beginning of a long command: whoever believes it makes room for that much."""
    return b"\x06" + size.to_bytes(8, "big")


TLS_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(range(32)) + b"\x20" + bytes(32) + b"\0\x02\x13\x01"
HTTP = b"GET /run HTTP/1.1\r\nHost: potluck\r\nUser-Agent: curl/8\r\nAccept: */*\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """What a stranger says on a bare connection, part by part, each after an answer or a moment."""

    parts: tuple[bytes, ...]
    patience_s: float = PATIENCE_S

    def __call__(self, port: int) -> str:
        heard = b""
        deadline = time.monotonic() + self.patience_s
        with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
            line.settimeout(self.patience_s / (1 + len(self.parts)))
            try:
                words = iter(self.parts)
                while time.monotonic() < deadline:
                    line.sendall(next(words, b""))
                    with contextlib.suppress(TimeoutError):
                        if not (said := line.recv(4096)):
                            return CLOSED
                        heard += said
                    if _READY in heard:
                        return ACCEPTED
            except OSError:
                return CLOSED
        return STAYED


class ZmqKnock:
    """What a ZeroMQ socket with these keys achieves."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: Mapping[int, bytes]) -> None:
        self._context, self._options = context, options

    def __call__(self, port: int) -> str:
        with self._context.socket(zmq.DEALER) as knock:
            knock.setsockopt(zmq.LINGER, 0)
            knock.setsockopt(zmq.RECONNECT_IVL, -1)
            for option, value in self._options.items():
                knock.setsockopt(option, value)
            events = knock.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
            try:
                knock.connect(f"tcp://127.0.0.1:{port}")
                with contextlib.suppress(zmq.Again):
                    knock.send_multipart([b"let", b"me", b"in"], zmq.NOBLOCK)
                if not events.poll(5000):
                    return STAYED
                what = int.from_bytes(events.recv_multipart()[0][:2], "little")
                return ACCEPTED if what == zmq.EVENT_HANDSHAKE_SUCCEEDED else CLOSED
            finally:
                knock.disable_monitor()


def curve_options(server: bytes) -> dict[int, bytes]:
    """A key pair of the stranger's own, for a host with this public key."""
    public, secret = zmq.curve_keypair()
    keys = {zmq.CURVE_SERVERKEY: z85.encode(server), zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret}
    return {int(option): value for option, value in keys.items()}


# -- a recorded handshake -----------------------------------------------------------------------------------


class Recorder:
    """Between a guest and its host, as an eavesdropper: passes everything on and keeps what the guest said."""

    def __init__(self, port: int) -> None:
        self.said: list[bytes] = []
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for ends in ((near, far, True), (far, near, False)):
                self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        heard = bytearray()
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                heard += part
                sink.sendall(part)
        if up and heard:
            self.said.append(bytes(heard))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if not up:
            source.close()
            sink.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


def record(token: Token, name: str) -> list[bytes]:
    """All that a real guest of this name says from its first byte until it leaves; the control connection first."""
    recorder = Recorder(token.port)
    try:
        heard = Token(
            addresses=("127.0.0.1",),
            port=recorder.port,
            host_public=token.host_public,
            guest_secret=token.guest_secret,
        )
        guest = GuestSocket(heard)
        guest.handshake(10)
        guest.send_control(pack(HelloMessage(name=name, device="cpu")))
        guest.receive(5.0)
        guest.send_control(pack(LeaveMessage(reason="it was recorded")))
        guest.close(linger_s=2.0)
    finally:
        recorder.close()
    # A guest first looks which address answers, and says nothing there.
    return sorted((said for said in recorder.said if len(said) > 64), key=len, reverse=True)


def handshake_parts(said: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """A recorded connection as greeting, HELLO, INITIATE and everything after."""
    parts, at = [said[:64]], 64
    for _ in range(2):
        long = bool(said[at] & 2)
        size = int.from_bytes(said[at + 1 : at + (9 if long else 2)], "big")
        end = at + (9 if long else 2) + size
        parts.append(said[at:end])
        at = end
    return parts[0], parts[1], parts[2], said[at:]


# -- all of them --------------------------------------------------------------------------------------------


class Strangers:
    """Every kind of stranger, in turn; how often each came and what became of it is in `outcomes`."""

    def __init__(self, *, port: int, host_public: bytes, recordings: Sequence[bytes], seed: int) -> None:
        self._port = port
        self._chance = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._host_public = host_public
        self._recordings = recordings
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.kinds: dict[str, Callable[[], Callable[[int], str]]] = {
            "connects and leaves": lambda: Call((), 0.01),
            "connects and waits": lambda: Call((b"",)),
            "random bytes": lambda: Call((self._bytes(1, 2000),)),
            "a signature, then random bytes": lambda: Call((b"\xff" + bytes(8) + b"\x7f", self._bytes(1, 500))),
            "HTTP": lambda: Call((HTTP,)),
            "a TLS hello": lambda: Call((TLS_HELLO,)),
            "ZMTP 1": lambda: Call((b"\x01\x00" + b"\x05\x00hallo",)),
            "ZMTP 2": lambda: Call((b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x05hallo",)),
            "a NULL greeting": lambda: Call((greeting(b"NULL"), command(b"READY", b""))),
            "a PLAIN greeting": lambda: Call((greeting(b"PLAIN"), command(b"HELLO", b"\x04root\x04root"))),
            "as if it were the server": lambda: Call((greeting(server=True), command(b"READY", b""))),
            "READY without a handshake": lambda: Call((greeting(), command(b"READY", b"\x00" * 30))),
            "a made-up HELLO": lambda: Call((greeting(), command(b"HELLO", self._bytes(194, 194)))),
            "a HELLO of the wrong length": lambda: Call((greeting(), command(b"HELLO", self._bytes(0, 600)))),
            "a frame of 2^60 bytes": lambda: Call((greeting(), a_frame_of(1 << 60))),
            "a frame of 16 MiB": lambda: Call((greeting(), a_frame_of(16 << 20) + bytes(4096))),
            "a wrong host key": lambda: ZmqKnock(self._context, curve_options(new_keys().public)),
            "an unknown guest key": lambda: ZmqKnock(self._context, curve_options(self._host_public)),
            "ZeroMQ without keys": lambda: ZmqKnock(self._context, {}),
            "ZeroMQ with a password": lambda: ZmqKnock(
                self._context, {int(zmq.PLAIN_USERNAME): b"root", int(zmq.PLAIN_PASSWORD): b"root"}
            ),
        }
        if recordings:
            self.kinds |= {
                "a replay at once": lambda: Call((self._recording(),)),
                "a replay step by step": lambda: Call(handshake_parts(self._recording())),
                "a replay, damaged": lambda: Call(handshake_parts(self._damaged(self._recording()))),
                "a replayed INITIATE alone": lambda: Call((greeting(), handshake_parts(self._recording())[2])),
                "a replayed HELLO, then garbage": lambda: Call(
                    (*handshake_parts(self._recording())[:2], command(b"INITIATE", self._bytes(300, 700)))
                ),
            }

    def knock(self, number: int) -> str:
        """One stranger, of the kind whose turn it is; what became of it."""
        kind = list(self.kinds)[number % len(self.kinds)]
        outcome = self.kinds[kind]()(self._port)
        self.outcomes[kind, outcome] += 1
        return outcome

    @property
    def accepted(self) -> int:
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome == ACCEPTED)

    def close(self) -> None:
        self._context.term()

    def _bytes(self, least: int, most: int) -> bytes:
        return self._chance.randbytes(self._chance.randint(least, most))

    def _recording(self) -> bytes:
        return self._chance.choice(self._recordings)

    def _damaged(self, said: bytes) -> bytes:
        # Behind the frames' lengths: those are what handshake_parts() reads.
        at = self._chance.randrange(64 + 20, 64 + 200)
        return said[:at] + bytes([said[at] ^ (1 << self._chance.randrange(8))]) + said[at + 1 :]


# -- a crowd ------------------------------------------------------------------------------------------------

MANNERS = ("silent", "greeting", "large frame", "trickle")
"""How a connection is held: without a word, after a greeting, with nearly all of a long frame, byte by byte."""
TRICKLE_S = 0.5


class Crowd:
    """Holds connections open and opens each again as soon as it is closed, in whatever thread calls turn()."""

    def __init__(self, port: int, count: int, *, frame_bytes: int, manners: Sequence[str] = MANNERS) -> None:
        self._port, self._frame_bytes, self._manners = port, frame_bytes, manners
        self._selector = selectors.DefaultSelector()
        self._left: dict[socket.socket, memoryview] = {}
        self._trickled = 0.0
        self.opened = self.closed = 0
        for _ in range(count):
            self._open()

    @property
    def held(self) -> int:
        return len(self._left)

    def turn(self, timeout_s: float) -> None:
        """Say what can be said, and come again where somebody closed."""
        for key, mask in self._selector.select(timeout_s):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            try:
                if mask & selectors.EVENT_READ and not line.recv(65536):
                    raise ConnectionResetError
                if mask & selectors.EVENT_WRITE:
                    self._say(line, key.data)
            except BlockingIOError:
                continue
            except OSError:
                self._closed_by_peer(line)
                self._open()
        if time.monotonic() - self._trickled > TRICKLE_S:
            self._trickled = time.monotonic()
            self._trickle()

    def close(self) -> None:
        for line in list(self._left):
            self._closed_by_peer(line)
        self._selector.close()

    def _open(self) -> None:
        manner = self._manners[self.opened % len(self._manners)]
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(("127.0.0.1", self._port))
        self.opened += 1
        words = {
            "silent": b"",
            "greeting": greeting(),
            "large frame": greeting() + a_frame_of(self._frame_bytes) + bytes(self._frame_bytes - 1),
            "trickle": greeting() + command(b"HELLO", bytes(194)),
        }[manner]
        self._left[line] = memoryview(words)
        at_once = bool(words) and manner != "trickle"
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if at_once else 0)
        self._selector.register(line, events, manner)

    def _say(self, line: socket.socket, manner: str) -> None:
        self._left[line] = self._left[line][line.send(self._left[line]) :]
        if not self._left[line]:
            self._selector.modify(line, selectors.EVENT_READ, manner)

    def _trickle(self) -> None:
        for key in list(self._selector.get_map().values()):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if key.data == "trickle" and self._left[line]:
                with contextlib.suppress(OSError):  # if it is over, the selector will say so
                    self._left[line] = self._left[line][line.send(self._left[line][:1]) :]

    def _closed_by_peer(self, line: socket.socket) -> None:
        self.closed += 1
        self._selector.unregister(line)
        del self._left[line]
        line.close()


@contextlib.contextmanager
def held(crowd: Crowd) -> Iterator[Crowd]:
    """A crowd that holds its connections, in a thread of its own."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            crowd.turn(0.02)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield crowd
    finally:
        over.set()
        thread.join(10)
        crowd.close()


def until(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether it holds in time. A connection that finds the port full tries again after 1, 3, 7, 15 and 31 s."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


_BURST = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
{listen}
print(port, flush=True)
sys.stdin.readline()
for _ in range(2):
    ctypes.PyDLL(None).usleep(400_000)  # with Python's lock, as the import of a large library does
    files = [open(os.devnull) for _ in range(100)]
    for file in files:
        file.close()
print("enough files", flush=True)
sys.stdin.readline()
listening.close()
"""


def files_in_a_burst(listen: str) -> int:
    """How many files a process of 256 has open after bursts of strangers while Python is busy; it needs 100 more.

    Args:
        listen: code that sets `listening`, which can be closed, and its `port`.
    """
    command = [sys.executable, "-c", _BURST.format(listen=listen)]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}"}
    with (
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as crowd,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        crowd.callback(process.kill)
        port = int(process.stdout.readline())
        print("go", file=process.stdin, flush=True)
        for _ in range(2):
            time.sleep(0.1)
            for _ in range(400):
                one = crowd.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            time.sleep(0.3)
        assert process.stdout.readline() == "enough files\n"
        files = psutil.Process(process.pid).num_fds()
        print("end", file=process.stdin, flush=True)
        assert process.wait(10) == 0
        return files
