"""The sockets between host and guests: owns ZeroMQ, its options and its threads.

All methods but wake() belong to one thread at a time. Large frames are sent without a copy: do not change their
memory after send() until the message has been sent (a new buffer for every message is the simple way). pyzmq frees
such memory in its own thread, one for the whole process, which close() cannot end.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import zmq

from potluck.errors import ConfigError, NetworkError, RefusedError, WireError
from potluck.limits import usable_memory
from potluck.spec.messages import Channel
from potluck.wire.admission import (
    CURVE_OVERHEAD_BYTES,
    DISCONNECTED,
    FAILED_AUTH,
    FAILED_NO_DETAIL,
    FAILED_PROTOCOL,
    HANDSHAKE_S,
    SUCCEEDED,
    Authenticator,
    Monitor,
    SocketMaker,
)
from potluck.wire.admitted import Admitted
from potluck.wire.files import connection_room, make_room, open_now, warning_of
from potluck.wire.frames import MAX_FRAME_BYTES, MAX_FRAMES, MAX_PARTS, PART_BYTES, cut, joined
from potluck.wire.gate import listen
from potluck.wire.keys import HostKeys, public_of
from potluck.wire.queued import Queued, budget_bytes
from potluck.wire.reach import PortAnswer, first_answering, who_answers
from potluck.wire.token import Token
from potluck.wire.waker import Waker

Frame = bytes | memoryview

MAX_MESSAGES_PER_CALL = 64
ENOUGH_BYTES_PER_CALL = 4 * 1024 * 1024
"""About the most bytes that one receive() returns, so that the caller can serve its timers, and the memory of large
frames is reused while it is in the cache."""

IO_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Number of I/O threads. One encrypts about 550 MB a second; connections are spread over them."""
QUEUE_MESSAGES = 1024
"""Messages queued for one peer before send() returns False. The sender's credit ends long before that."""
UNREAD_MESSAGES = 64
"""Unread messages kept for one peer. Then its connection stops reading."""

MOST_UNREAD_BYTES = 2 * MAX_PARTS * PART_BYTES
"""The most bytes of an unfinished message on a connection: the longest message, and the system's buffers."""
LOOK_S = 0.5
"""Time between two checks of how much each connection has received."""

_GREETING_S = 1.0
_KNOCK = b""
"""A guest's first message on each connection, by which the host recognises guests' connections."""

_NEVER_MS = 24 * 3600 * 1000
"""The reconnect interval. -1 ("do not reconnect") would discard unread messages from before the disconnect."""


class ClosedAtOnceError(RefusedError):
    """The host closed the connection during the handshake: it is not the token's host, or too many strangers
    connect at the moment."""


class HostSocket:
    """The socket to which guests connect: encrypted, and open only to holders of the guests' key.

    A peer is one connection; its name is chosen by the guest, at random for each connection, and a second
    connection of the same name is ignored (so nobody can take over another's name).
    """

    port: int
    warning: str | None
    """A warning for the person at this machine, if any."""

    def __init__(
        self, *, bind: str, port: int, keys: HostKeys, on_denied: Callable[[str], None] | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise ConfigError(f"{port} is not a port", hint="ports are 1 to 65535; 0 picks a free one")
        limit = make_room()
        room = connection_room(limit, open_now())
        self.warning = warning_of(limit, room)
        self._station = _Station(self)
        try:
            self._socket = self._station.socket(zmq.ROUTER)
            _set_common_options(self._socket, PART_BYTES)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.BACKLOG, room.batch)
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            inside = Admitted(most=room.inside, most_bytes=MOST_UNREAD_BYTES)
            guests_key = keys.guest_public
            self._auth = Authenticator(self._station.socket, self._socket, guests_key, on_denied, room, inside)
            self._looked = time.monotonic()
            self._queued = Queued(most_bytes=budget_bytes(usable_memory()[0]))
            self._station.before_closing = self._auth.watch.close
            self.port, entrance = listen(self._socket, bind, port, room.batch)
            self._auth.watch.keep(entrance)
        except BaseException:
            self._station.close()
            raise
        self._poller = self._station.poller(self._socket, self._auth.socket)

    def receive(self, timeout_s: float) -> list[tuple[bytes, list[memoryview]]]:
        """The arrived messages, as (peer, frames). Waits up to `timeout_s` for the first, or for wake().

        This also admits new connections, so a host must call it often.
        """
        deadline = time.monotonic() + timeout_s
        with self._station.one_thread:
            while True:
                self._poller.poll(_milliseconds(deadline))
                woken = self._station.waker.drain()
                self._auth.serve()
                received = _receive(self._socket, MAX_MESSAGES_PER_CALL, MAX_PARTS)
                messages = [(bytes(peer), joined(parts)) for peer, *parts in received if self._says(peer, parts)]
                self._look()
                if messages or woken or time.monotonic() >= deadline:
                    return messages

    def _says(self, peer: memoryview, parts: list[memoryview]) -> bool:
        """Whether this is more than the greeting. Either shows that the connection is a guest's."""
        knock = len(parts) == 1 and parts[0] == _KNOCK
        frame = parts[-1].obj if parts else None
        if isinstance(frame, zmq.Frame):
            with contextlib.suppress(zmq.ZMQError):
                self._auth.watch.heard(int(frame.get(zmq.SRCFD)), bytes(peer))
        return not knock

    def _look(self) -> None:
        """Check occasionally, when nothing is left to read, for peers in the middle of an endless message."""
        now = time.monotonic()
        if now - self._looked > LOOK_S and not self._socket.poll(0):
            self._looked = now
            self._queued.look(now)
            self._auth.watch.close_endless()

    @staticmethod
    def address_of(frames: Sequence[Frame]) -> str:
        """The remote address of frames from receive()."""
        for frame in frames:
            if isinstance(frame, memoryview) and isinstance(frame.obj, zmq.Frame):
                with contextlib.suppress(zmq.ZMQError):
                    return str(frame.obj.get("Peer-Address")).removeprefix("::ffff:")  # IPv4, where both are taken
        return "unknown"

    def send(self, peer: bytes, frames: Iterable[Frame]) -> bool:
        """Queue a message for a peer; never waits. Returns False if the peer is gone or its queue is full."""
        message = [peer, *frames]
        sizes = [memoryview(frame).nbytes for frame in message]
        with self._station.one_thread:
            counted_bytes = self._queued.to_track(peer, sum(sizes))
            if counted_bytes is None:
                return _send(self._socket, message)
            # Frames leave in their order: when the largest has left, the message has.
            largest = sizes.index(max(sizes))
            tracked = zmq.Frame(message[largest], track=True, copy=False, copy_threshold=0)
            if not _send(self._socket, [*message[:largest], tracked, *message[largest + 1 :]]):
                return False
            self._queued.sent(peer, tracked.tracker, counted_bytes, time.monotonic())
            return True

    def overfull(self) -> list[tuple[bytes, int]]:
        """Peers that had to be disconnected because too much was queued, with their queued bytes.

        Of the peers that do not read, these have not read for the longest time.
        """
        stuck = self._queued.stuck(time.monotonic())
        for peer, _ in stuck:
            self._auth.watch.close_named(peer)
        return stuck

    def wake(self) -> None:
        """Make the current or next receive() return immediately. Callable from any thread."""
        self._station.waker.wake()

    def close(self, *, linger_s: float = 0.5) -> None:
        """Free the port. Queued messages get `linger_s` to be sent. A second call does nothing."""
        with self._station.one_thread:
            self._station.close({self._socket: linger_s})


class GuestSocket:
    """A guest's two connections to its host: control for small messages, data for tensors.

    It lives as long as its connections. A broken connection is not made again, because messages were lost with it:
    check `connected`, and then use a new GuestSocket.
    """

    guest_id: bytes
    address: str
    """The token's address that answered."""

    def __init__(self, token: Token, *, connect_timeout_s: float = 10.0) -> None:
        self.guest_id = secrets.token_bytes(8)
        self.address, self._number = first_answering(token.addresses, token.port, connect_timeout_s)
        self._port = token.port
        self._began = time.monotonic()
        self._station = _Station(self)
        try:
            self._control = _ConnectionState(self._station.socket, "control", token, self.guest_id, self._number)
            self._data = _ConnectionState(self._station.socket, "data", token, self.guest_id, self._number)
        except BaseException:
            self._station.close()
            raise
        self._links = (self._control, self._data)
        self._poller = self._station.poller(
            *(part for link in self._links for part in (link.socket, link.monitor.socket))
        )

    @property
    def connected(self) -> bool:
        """False after receive() or handshake() has detected that a connection failed or ended."""
        return not any(link.ended for link in self._links)

    def handshake(self, timeout_s: float = HANDSHAKE_S) -> None:
        """Wait until the host has admitted both connections.

        Raises RefusedError: it is a host that does not accept this token (ClosedAtOnceError: or too many strangers
        connected to it). NetworkError: it is no host, or it is silent.
        """
        deadline = time.monotonic() + timeout_s
        events = zmq.Poller()
        for link in self._links:
            events.register(link.monitor.socket, zmq.POLLIN)
        with self._station.one_thread:
            while self.connected and not all(link.open for link in self._links):
                if time.monotonic() >= deadline:
                    break
                events.poll(_milliseconds(deadline))
                for link in self._links:
                    link.watch()
            for link in self._links:
                if link.open and not link.ended:
                    _send(link.socket, [_KNOCK])
        if not self.connected or not all(link.open for link in self._links):
            self._explain()

    def receive(self, timeout_s: float) -> list[tuple[Channel, list[memoryview]]]:
        """The arrived messages, control first. Waits up to `timeout_s` for a message, wake() or the end."""
        deadline = time.monotonic() + timeout_s
        with self._station.one_thread:
            while True:
                self._poller.poll(_milliseconds(deadline))
                woken = self._station.waker.drain()
                was_connected = self.connected
                messages: list[tuple[Channel, list[memoryview]]] = []
                for link in self._links:
                    link.watch()
                    left = MAX_MESSAGES_PER_CALL - len(messages)
                    received = _receive(link.socket, left, MAX_FRAMES + 1)
                    messages.extend((link.channel, frames) for frames in received)
                ended = was_connected and not self.connected
                if messages or woken or ended or time.monotonic() >= deadline:
                    return messages

    def send_control(self, frames: Iterable[Frame]) -> bool:
        """Queue a small message; never waits. Returns False if the connection is gone or its queue is full."""
        return self._send(self._control, frames)

    def send_data(self, frames: Iterable[Frame]) -> bool:
        """Queue a message with tensors; never waits. Returns False if the connection is gone or its queue is
        full."""
        return self._send(self._data, frames)

    def wake(self) -> None:
        """Make the current or next receive() return immediately. Callable from any thread."""
        self._station.waker.wake()

    def close(self, *, linger_s: float = 0.5) -> None:
        """End the connections. Queued messages get `linger_s` to be sent."""
        with self._station.one_thread:
            # What is queued for a connection that ended would only be waited for.
            self._station.close({link.socket: 0.0 if link.ended else linger_s for link in self._links})

    def _send(self, link: _ConnectionState, frames: Iterable[Frame]) -> bool:
        with self._station.one_thread:
            return self.connected and _send(link.socket, cut(list(frames)))

    def _explain(self) -> NoReturn:
        """Raise the error for a failed handshake.

        A host with another key and a web server both just close the connection; only their greetings distinguish
        them. The host closes it immediately, or if it is busy, after the handshake's time limit.
        """
        after_s = time.monotonic() - self._began
        where = f"{self.address} port {self._port}"
        fresh = "use the token that the host shows now; `potluck host --resume` keeps the old one valid"
        if any(link.failure == FAILED_AUTH for link in self._links):
            raise RefusedError(f"the host at {where} refused this token", hint=fresh)
        answer = who_answers(self._number, self._port, timeout_s=_GREETING_S)
        refused = any(link.failure is not None for link in self._links)
        if answer is PortAnswer.CURVE and refused and after_s < HANDSHAKE_S / 2:
            raise ClosedAtOnceError(f"the host at {where} is not the host of this token", hint=fresh)
        if answer is PortAnswer.SILENT and refused:
            raise ClosedAtOnceError(
                f"there is no potluck host at {where}, or too many unknown peers connect to its port: it closed "
                "the connection",
                hint="is it the right machine? If so, try again in a moment; its log names strangers",
            )
        if answer is PortAnswer.CURVE:
            raise NetworkError(
                f"the host at {where} did not finish the handshake within {after_s:.1f} s",
                hint="is the host suspended or overloaded? Try again in a moment",
            )
        if answer is PortAnswer.NOTHING:
            raise NetworkError(
                f"the host at {where} closed the connection",
                hint="is the host still running? Try again in a moment",
            )
        raise NetworkError(
            f"there is no potluck host at {where}, but {answer.value}",
            hint="is the port forwarded to the right machine? Does another program use it?",
        )


class _ConnectionState:
    """One of a guest's connections and its state."""

    def __init__(
        self,
        new_socket: SocketMaker,
        channel: Channel,
        token: Token,
        guest_id: bytes,
        number: str,
    ) -> None:
        self.channel: Channel = channel
        self.open = False
        self.ended = False
        self.failure: int | None = None
        self.socket = new_socket(zmq.DEALER)
        _set_common_options(self.socket, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.ROUTING_ID, guest_id + channel[:1].encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, token.host_public)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public_of(token.guest_secret))
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, token.guest_secret)
        self.monitor = Monitor(
            new_socket, self.socket, SUCCEEDED | DISCONNECTED | FAILED_AUTH | FAILED_PROTOCOL | FAILED_NO_DETAIL
        )
        if ":" in number:
            self.socket.setsockopt(zmq.IPV6, 1)
            number = f"[{number}]"
        self.socket.connect(f"tcp://{number}:{token.port}")

    def watch(self) -> None:
        """Process the monitor's events; never waits."""
        for event, _ in self.monitor.drain():
            if event == SUCCEEDED:
                self.open = True
                continue
            self.ended = True
            if not self.open and self.failure is None:
                self.failure = event


class _Station:
    """A private zmq context with its sockets and its waker, which end together.

    They end with their owner even if it is not closed. Otherwise an owner in an exception's traceback could be
    collected in an order in which pyzmq waits forever for a socket that nothing can close any more.
    """

    def __init__(self, owner: object) -> None:
        self._context = zmq.Context(io_threads=IO_THREADS)
        self._sockets: list[zmq.Socket[bytes]] = []
        self.waker = Waker()
        self.before_closing: Callable[[], None] = lambda: None
        self.one_thread = _OneThread()
        # Not at exit: a daemon thread may still use the sockets, and the process ends anyway.
        weakref.finalize(owner, self.close).atexit = False

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        self._sockets.append(made)
        return made

    def poller(self, *sockets: zmq.Socket[bytes]) -> zmq.Poller:
        """A poller for these sockets and the waker."""
        poller = zmq.Poller()
        poller.register(self.waker.inner.fileno(), zmq.POLLIN)
        for member in sockets:
            poller.register(member, zmq.POLLIN)
        return poller

    def close(self, lingers_s: Mapping[zmq.Socket[bytes], float] | None = None) -> None:
        """End everything. A socket in `lingers_s` gets that long to send its queue."""
        if self._context.closed:
            return
        self.before_closing()
        for member in self._sockets:
            member.close(linger=int(1000 * (lingers_s or {}).get(member, 0.0)))
        self.waker.close()
        self._context.term()


class _OneThread:
    """Raises an exception if two threads use zmq sockets at the same time, which would otherwise abort Python."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("a potluck socket is used by two threads at once; only wake() may be called")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _set_common_options(target: zmq.Socket[bytes], most_bytes: int) -> None:
    target.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    target.setsockopt(zmq.RCVHWM, UNREAD_MESSAGES)
    target.setsockopt(zmq.MAXMSGSIZE, most_bytes + CURVE_OVERHEAD_BYTES)
    target.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    # A machine that lost its power or its cable says nothing: let the system find out, and free what it held.
    target.setsockopt(zmq.TCP_KEEPALIVE, 1)
    target.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
    target.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    target.setsockopt(zmq.TCP_KEEPALIVE_CNT, 6)
    target.setsockopt(zmq.TCP_MAXRT, 60_000)


def _milliseconds(deadline: float) -> int:
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


def _receive(source: zmq.Socket[bytes], limit: int, most_parts: int) -> list[list[memoryview]]:
    """Up to `limit` arrived messages. Parts of a message above the limit are dropped."""
    messages: list[list[memoryview]] = []
    size_bytes = 0
    while len(messages) < limit and size_bytes < ENOUGH_BYTES_PER_CALL:
        try:
            frame = source.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            break
        parts = [frame.buffer]
        while frame.more:
            frame = source.recv(copy=False)
            # One too many is kept: unpack() must see that it was too many. The peer comes on top.
            if len(parts) <= most_parts + 1:
                parts.append(frame.buffer)
        messages.append(parts)
        size_bytes += sum(part.nbytes for part in parts)
    return messages


def _send(target: zmq.Socket[bytes], frames: Sequence[Frame | zmq.Frame]) -> bool:
    for frame in frames:
        # The receiver would cut the connection for it.
        if (
            size := frame.buffer.nbytes if isinstance(frame, zmq.Frame) else memoryview(frame).nbytes
        ) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {size} bytes, at most {MAX_FRAME_BYTES} can be sent")
    try:
        target.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True
