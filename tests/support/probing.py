"""A probe that listens, for tests of who visits it. It knows nothing of the visitors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from potluck.probe.link_server import LinkServer
from potluck.spec.probed import DeviceSpeed
from potluck.wire.keys import new_keys
from potluck.wire.token import Token
from potluck.wire.transport import HostSocket


@contextlib.contextmanager
def serving(speed: DeviceSpeed) -> Iterator[tuple[Token, LinkServer]]:
    """What `potluck probe --listen` is, in a thread of this process."""
    keys = new_keys()
    door = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    server = LinkServer(door, "127.0.0.1", speed)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.serve(0.05)
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield (
            Token(
                addresses=("127.0.0.1",), port=door.port, host_public=keys.public, guest_secret=keys.guest_secret
            ),
            server,
        )
    finally:
        stop.set()
        door.wake()
        thread.join(15)
