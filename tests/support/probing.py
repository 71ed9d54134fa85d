"""A probe or a doctor that listens, for tests of what connects to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from potluck.probe.link_server import LinkServer
from potluck.probe.meeting import Listener
from potluck.spec.facts import Facts
from potluck.spec.probed import DeviceSpeed
from potluck.wire.keys import new_keys
from potluck.wire.token import Token
from potluck.wire.transport import HostSocket

Server = TypeVar("Server", LinkServer, Listener)


@contextlib.contextmanager
def serving(speed: DeviceSpeed) -> Iterator[tuple[Token, LinkServer]]:
    """What `potluck probe --listen` is, in a thread of this process."""
    with _served_by(lambda host: LinkServer(host, "127.0.0.1", speed)) as served:
        yield served


@contextlib.contextmanager
def listening(facts: Facts) -> Iterator[Token]:
    """What `potluck doctor --listen` is, in a thread of this process."""
    with _served_by(lambda host: Listener(host, facts)) as (token, _):
        yield token


@contextlib.contextmanager
def _served_by(made: Callable[[HostSocket], Server]) -> Iterator[tuple[Token, Server]]:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    server = made(host)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.serve(0.05)
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    address = ("127.0.0.1",)
    try:
        yield (
            Token(addresses=address, port=host.port, host_public=keys.public, guest_secret=keys.guest_secret),
            server,
        )
    finally:
        stop.set()
        host.wake()
        thread.join(15)
