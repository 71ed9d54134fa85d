"""The listening port of a host, and how many connections libzmq may accept at once.

libzmq accepts all connections in its own thread, and each one is an open file. While Python is busy (importing
torch takes a second), they are not counted, and a burst of strangers uses up every file that the process may open.
Here connections wait in the system's queue, where they use no file, until admit() lets libzmq accept at most
`batch` of them. Later connections wait, so the limit holds even if Python is stopped in the middle of it.

This works on Linux only. libzmq listens on a socket that is made here (ZMQ_USE_FD) and waits for it with epoll;
this module changes the entry in that epoll, which /proc shows. While libzmq accepts, a packet filter on the socket
delays new connections: their systems repeat the packets a fifth of a second later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import select
import socket
import struct
import sys
import time
import weakref
from pathlib import Path

import zmq

from potluck.errors import ConfigError, NetworkError, PortTakenError, PotluckError
from potluck.wire.reach import who_holds

IS_AVAILABLE = sys.platform == "linux"

_FOUND_S = 1.0
_ACCEPTED_S = 0.05
"""Time limit for libzmq to accept the waiting connections; each takes about 50 µs."""
_LOOK_S = 0.0001

# Of <asm-generic/socket.h> and <sys/epoll.h>; Python does not name them.
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_MODIFY = 3
# Of a packet, from its TCP header on: the flags; only SYN of SYN and ACK; then keep all of it, else nothing.
_BEGINNINGS = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0))
_CODE = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _BEGINNINGS))
_FILTER = struct.pack("HP", len(_BEGINNINGS), ctypes.addressof(_CODE))
"""A packet filter that lets connections begin but not be established."""
_EPOLL_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"


def listen(target: zmq.Socket[bytes], bind: str, port: int, batch: int | None = None) -> tuple[int, Gate | None]:
    """Let a socket of libzmq listen. Returns its port, and its gate if there is one (not if `batch` is None).

    Set the socket's options before.

    Raises:
        PotluckError: the port cannot be opened, and why.
    """
    address = {"": "0.0.0.0", "*": "0.0.0.0", "localhost": "127.0.0.1"}.get(bind, bind)
    try:
        if batch is None or not IS_AVAILABLE:
            return _bind(target, address, port), None
        gate = Gate(address, port, batch)
        try:
            gate.lend_to(target)
        except BaseException:
            gate.close()
            raise
        return gate.port, gate
    except (OSError, zmq.ZMQError) as error:
        number = errno.ENODEV if isinstance(error, socket.gaierror) else error.errno
        raise _unopened(number, error.strerror or str(error), bind, port) from None


def _bind(target: zmq.Socket[bytes], address: str, port: int) -> int:
    if ":" in address:
        target.setsockopt(zmq.IPV6, 1)
        address = f"[{address}]"
    target.bind(f"tcp://{address}:{port or '*'}")
    endpoint = target.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def _unopened(number: int | None, words: str, bind: str, port: int) -> PotluckError:
    """Why a port cannot be opened."""
    if number in (errno.EADDRINUSE, zmq.EADDRINUSE):
        holder = who_holds(port)
        return PortTakenError(
            f"port {port} is taken" + (f" by {holder}" if holder else ""),
            hint="choose another port, or 0 for a free one; end that process if it is an old host",
        )
    if number in (errno.EADDRNOTAVAIL, zmq.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
        return ConfigError(
            f"this machine has no address {bind!r} to listen on",
            hint="0.0.0.0 listens on all addresses, 127.0.0.1 for guests on this machine only",
        )
    return NetworkError(
        f"port {port} on {bind} cannot be opened: {words}",
        hint="ports below 1024 need special rights; choose one above",
    )


class Gate:
    """A port at which connections wait until they are admitted, a batch at a time."""

    def __init__(self, address: str, port: int, batch: int) -> None:
        """Listen. Raises OSError if that is not possible."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.batch = batch
        self._interest: _Interest | None = None
        self._lent: int | None = None
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address == "::":
                self._listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._listening.bind((address, port))
            self._listening.setblocking(False)
            self._keep_out()
            self._listening.listen(batch - 1)  # Linux keeps one more
        except BaseException:
            self._listening.close()
            raise
        self.port = int(self._listening.getsockname()[1])
        _open.add(self)

    def fileno(self) -> int:
        """Readable while a connection waits."""
        return self._listening.fileno()

    def lend_to(self, target: zmq.Socket[bytes]) -> None:
        """Let a socket of libzmq listen here. Its options must be set before."""
        self._lent = lent = os.dup(self._listening.fileno())  # libzmq closes it with its socket
        target.setsockopt(zmq.USE_FD, lent)
        target.bind("tcp://127.0.0.1:*")  # the address means nothing where a descriptor is given
        deadline = time.monotonic() + _FOUND_S
        while self._interest is None and time.monotonic() < deadline:
            self._interest = _find(lent)
            time.sleep(_LOOK_S)
        if self._interest is not None:
            self._interest.set(0)
        self._let_in()

    @property
    def holds(self) -> bool:
        """Whether connections must wait here; otherwise libzmq accepts by itself, as on other systems."""
        return self._interest is not None

    def somebody_waits(self) -> bool:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        return self._interest is not None and bool(poll.poll(0))

    def admit(self) -> None:
        """Let libzmq accept at most `batch` waiting connections, and none that arrives after this call."""
        if self._interest is None:
            return
        self._keep_out()
        try:
            self._interest.set(select.EPOLLIN)
            deadline = time.monotonic() + _ACCEPTED_S
            while self.somebody_waits() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        finally:
            self._interest.set(0)
            self._let_in()

    def close(self) -> None:
        """Stop listening. The caller closes libzmq's socket."""
        _open.discard(self)
        self._listening.close()

    def leave_to_parent(self) -> None:
        """Close the port in a forked child, because otherwise it would stay in use after the host has ended."""
        self._listening.close()
        if self._lent is not None:
            with contextlib.suppress(OSError):
                os.close(self._lent)

    def _keep_out(self) -> None:
        with contextlib.suppress(OSError):  # a system without packet filters
            self._listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _FILTER)

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


_open: weakref.WeakSet[Gate] = weakref.WeakSet()


def _in_child() -> None:
    for gate in list(_open):
        gate.leave_to_parent()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class _Interest:
    """The events that libzmq's epoll waits for at one descriptor."""

    def __init__(self, epoll: int, descriptor: int, data: int) -> None:
        self._epoll, self._descriptor, self._data = epoll, descriptor, data
        self._library = ctypes.CDLL(None, use_errno=True)

    def set(self, events: int) -> None:
        event = ctypes.create_string_buffer(struct.pack(_EPOLL_EVENT, events, self._data))
        if self._library.epoll_ctl(self._epoll, _MODIFY, self._descriptor, event):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _find(descriptor: int) -> _Interest | None:
    """The epoll of this process that waits for this descriptor to become readable."""
    try:
        entries = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return None  # no /proc, as in a bare chroot, or none that may be read
    for entry in entries:
        with contextlib.suppress(OSError):
            if os.readlink(entry) != "anon_inode:[eventpoll]":
                continue
            for line in Path("/proc/self/fdinfo", entry.name).read_text().splitlines():
                words = line.split()  # tfd: 12 events: 19 data: 7fafd8000b70 …
                if words[:1] == ["tfd:"] and int(words[1]) == descriptor and int(words[3], 16) & select.EPOLLIN:
                    return _Interest(int(entry.name), descriptor, int(words[5], 16))
    return None
