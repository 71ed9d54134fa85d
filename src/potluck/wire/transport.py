"""The sockets between host and guests: owns ZeroMQ, its options and its threads.

All methods but wake() belong to one thread at a time. Large frames are sent from the memory they lie in: do
not change it after send() until the message has left (a fresh buffer for every message is the simple way).
pyzmq frees such memory in a thread of its own, one for the whole process, which close() cannot end.
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
from typing import Literal, NoReturn

import zmq

from potluck.errors import ConfigError, NetworkError, RefusedError, WireError
from potluck.limits import usable_memory
from potluck.wire.admitted import Admitted
from potluck.wire.door import (
    CURVE_OVERHEAD_BYTES,
    DISCONNECTED,
    FAILED_AUTH,
    FAILED_NO_DETAIL,
    FAILED_PROTOCOL,
    HANDSHAKE_S,
    SUCCEEDED,
    Door,
    Monitor,
    SocketMaker,
)
from potluck.wire.files import make_room, open_now, room_at_door, warning_of
from potluck.wire.frames import MAX_FRAME_BYTES, MAX_FRAMES, MAX_PARTS, PART_BYTES, cut, joined
from potluck.wire.gate import listen
from potluck.wire.keys import HostKeys, public_of
from potluck.wire.queued import Queued, budget_bytes
from potluck.wire.reach import PortAnswer, first_answering, who_answers
from potluck.wire.token import Token
from potluck.wire.waker import Waker

Frame = bytes | memoryview
Channel = Literal["control", "data"]

MAX_MESSAGES_PER_CALL = 64
ENOUGH_BYTES_PER_CALL = 4 * 1024 * 1024
"""What one receive() returns at most, or a message more: so that the caller gets to its timers, and so that the
memory of large frames is used again while it is still in the cache."""

IO_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""One encrypts some 550 MB a second; connections are spread over them."""
QUEUE_MESSAGES = 1024
"""Messages queued for one peer before send() says False; the sender's own credit ends long before."""
UNREAD_MESSAGES = 64
"""Messages of one peer kept before they are read; then its connection stops taking more."""

MOST_UNREAD_BYTES = 2 * MAX_PARTS * PART_BYTES
"""What a connection may bring without a message's end: the longest message, and what the system keeps besides."""
LOOK_S = 0.5
"""Between two looks at how much each connection has brought."""

_GREETING_S = 1.0
_KNOCK = b""
"""What a guest says first on each connection, so that the host knows which of them are guests'."""

_NEVER_MS = 24 * 3600 * 1000
"""As reconnect interval. -1, "do not reconnect", would throw away what came before the disconnect unread."""


class HungUpError(RefusedError):
    """The host hung up in the handshake: it is not the token's, or strangers crowd its door at this moment."""


class HostSocket:
    """Where guests connect: encrypted, open to holders of the guests' key only.

    A peer is one connection; its name is chosen by the guest, at random for each connection, and a
    second connection of the same name is ignored (no handover: nobody can take over another's name).
    """

    port: int
    warning: str | None
    """What the person at this machine should know, if anything."""

    def __init__(
        self, *, bind: str, port: int, keys: HostKeys, on_denied: Callable[[str], None] | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise ConfigError(f"{port} is not a port", hint="ports are 1 to 65535; 0 picks a free one")
        limit = make_room()
        room = room_at_door(limit, open_now())
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
            self._door = Door(self._station.socket, self._socket, keys.guest_public, on_denied, room, inside)
            self._looked = time.monotonic()
            self._queued = Queued(most_bytes=budget_bytes(usable_memory()[0]))
            self._station.before_closing = self._door.watch.close
            self.port, entrance = listen(self._socket, bind, port, room.batch)
            self._door.watch.keep(entrance)
        except BaseException:
            self._station.close()
            raise
        self._poller = self._station.poller(self._socket, self._door.zap)

    def receive(self, timeout_s: float) -> list[tuple[bytes, list[memoryview]]]:
        """What has arrived, as (peer, frames); waits up to `timeout_s` for the first, or for wake().

        Newcomers are let in from here, so a host must call this often.
        """
        deadline = time.monotonic() + timeout_s
        with self._station.one_thread:
            while True:
                self._poller.poll(_milliseconds(deadline))
                woken = self._station.waker.drain()
                self._door.serve()
                received = _receive(self._socket, MAX_MESSAGES_PER_CALL, MAX_PARTS)
                messages = [(bytes(peer), joined(parts)) for peer, *parts in received if self._says(peer, parts)]
                self._look()
                if messages or woken or time.monotonic() >= deadline:
                    return messages

    def _says(self, peer: memoryview, parts: list[memoryview]) -> bool:
        """Whether this is more than a knock; either shows that the connection is a guest's."""
        knock = len(parts) == 1 and parts[0] == _KNOCK
        frame = parts[-1].obj if parts else None
        if isinstance(frame, zmq.Frame):
            with contextlib.suppress(zmq.ZMQError):
                self._door.watch.heard(int(frame.get(zmq.SRCFD)), bytes(peer))
        return not knock

    def _look(self) -> None:
        """Now and then, when nothing is left to read: is a peer in the middle of a message that never ends?"""
        now = time.monotonic()
        if now - self._looked > LOOK_S and not self._socket.poll(0):
            self._looked = now
            self._queued.look(now)
            self._door.watch.hang_up_on_the_endless()

    @staticmethod
    def address_of(frames: Sequence[Frame]) -> str:
        """The address that frames from receive() came from, as the connection has it."""
        for frame in frames:
            if isinstance(frame, memoryview) and isinstance(frame.obj, zmq.Frame):
                with contextlib.suppress(zmq.ZMQError):
                    return str(frame.obj.get("Peer-Address")).removeprefix("::ffff:")  # IPv4, where both are taken
        return "unknown"

    def send(self, peer: bytes, frames: Iterable[Frame]) -> bool:
        """Queue a message for a peer; never waits. False: the peer is gone or its queue is full."""
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
        """Peers that had to be hung up on because too much waited, and how many bytes did.

        Of those that do not read, the ones that have not for the longest time.
        """
        stuck = self._queued.stuck(time.monotonic())
        for peer, _ in stuck:
            self._door.watch.hang_up(peer)
        return stuck

    @property
    def queued_bytes(self) -> int:
        """What waits for all peers together, as far as that was looked at."""
        return self._queued.total_bytes

    def wake(self) -> None:
        """Make the receive() under way, or the next one, return at once; from any thread."""
        self._station.waker.wake()

    def close(self, *, linger_s: float = 0.5) -> None:
        """Free the port; what is queued for guests gets `linger_s` to leave. Call it twice if you like."""
        with self._station.one_thread:
            self._station.close({self._socket: linger_s})


class GuestSocket:
    """A guest's two connections to its host: control for small messages, data for tensors.

    It lives as long as its connections: one that broke is not made again under the same name, because
    messages were lost with it. `connected` tells; then use a new GuestSocket.
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
            self._control = _Link(self._station.socket, "control", token, self.guest_id, self._number)
            self._data = _Link(self._station.socket, "data", token, self.guest_id, self._number)
        except BaseException:
            self._station.close()
            raise
        self._links = (self._control, self._data)
        self._poller = self._station.poller(
            *(part for link in self._links for part in (link.socket, link.monitor.socket))
        )

    @property
    def connected(self) -> bool:
        """False once a connection has failed or ended, as far as receive() or handshake() have seen."""
        return not any(link.ended for link in self._links)

    def handshake(self, timeout_s: float = HANDSHAKE_S) -> None:
        """Wait until the host has let both connections in.

        RefusedError: it is a host and does not accept this token (HungUpError: or its door was crowded just now).
        NetworkError: it is no host, or silent.
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
        """What has arrived, control first; waits up to `timeout_s` for something, wake() or the end."""
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
        """Queue a small message; never waits. False: the connection is gone or its queue is full."""
        return self._send(self._control, frames)

    def send_data(self, frames: Iterable[Frame]) -> bool:
        """Queue a message with tensors; never waits. False: the connection is gone or its queue is full."""
        return self._send(self._data, frames)

    def wake(self) -> None:
        """Make the receive() under way, or the next one, return at once; from any thread."""
        self._station.waker.wake()

    def close(self, *, linger_s: float = 0.5) -> None:
        """End the connections; what is queued gets `linger_s` to leave."""
        with self._station.one_thread:
            # What is queued for a connection that ended would only be waited for.
            self._station.close({link.socket: 0.0 if link.ended else linger_s for link in self._links})

    def _send(self, link: _Link, frames: Iterable[Frame]) -> bool:
        with self._station.one_thread:
            return self.connected and _send(link.socket, cut(list(frames)))

    def _explain(self) -> NoReturn:
        """Raise what a handshake that did not succeed means.

        A host that was given another host's key, and a web server, both just hang up: only the greeting of
        what listens there tells them apart. The host hangs up at once; a busy one after the handshake's time.
        """
        after_s = time.monotonic() - self._began
        where = f"{self.address} port {self._port}"
        fresh = "use the token that the host shows now; `potluck host --resume` keeps the old one valid"
        if any(link.failure == FAILED_AUTH for link in self._links):
            raise RefusedError(f"the host at {where} refused this token", hint=fresh)
        answer = who_answers(self._number, self._port, timeout_s=_GREETING_S)
        turned_away = any(link.failure is not None for link in self._links)
        if answer is PortAnswer.CURVE and turned_away and after_s < HANDSHAKE_S / 2:
            raise HungUpError(f"the host at {where} is not the one of this token", hint=fresh)
        if answer is PortAnswer.SILENT and turned_away:
            raise HungUpError(
                f"there is no potluck host at {where}, or unknown peers crowd its port: it closed the connection",
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


class _Link:
    """One of a guest's connections and what became of it."""

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
        """Take note of what the monitor saw; never waits."""
        for event, _ in self.monitor.drain():
            if event == SUCCEEDED:
                self.open = True
                continue
            self.ended = True
            if not self.open and self.failure is None:
                self.failure = event


class _Station:
    """A private zmq context with its sockets and its waker, which end together.

    They end with their owner even if nobody closes it: an owner in an exception's traceback would else be
    collected in an order in which pyzmq waits forever for a socket that nobody can close any more.
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
        """For these sockets and the waker."""
        poller = zmq.Poller()
        poller.register(self.waker.inner.fileno(), zmq.POLLIN)
        for member in sockets:
            poller.register(member, zmq.POLLIN)
        return poller

    def close(self, lingers_s: Mapping[zmq.Socket[bytes], float] | None = None) -> None:
        """End everything; a socket among `lingers_s` gets that long for what is queued."""
        if self._context.closed:
            return
        self.before_closing()
        for member in self._sockets:
            member.close(linger=int(1000 * (lingers_s or {}).get(member, 0.0)))
        self.waker.close()
        self._context.term()


class _OneThread:
    """Turns the use of zmq sockets by two threads at once, which would abort Python, into an exception."""

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
    """Up to `limit` messages that are there. What a message has above the allowed parts is not kept."""
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
