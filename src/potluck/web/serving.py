"""The process that serves a run's page, `python -m potluck.web.serving`; the run's own process starts and ends it.

It reads what to serve from the first line of its standard input, and pulses from the others. When the input ends,
it ends. It prints one line: the port that it listens on, or why it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.bounds import Finite, Natural, Text
from potluck.web.follower import Follower
from potluck.web.server import MOST_REQUEST_BYTES, PageServer
from potluck.web.state import GuestAbout, PageState, Pulse

AT_ONCE = 128
"""Connections accepted in one go, before the oldest are closed: many systems give a process 1024 files."""
NICENESS = 10
"""Niceness of the process: training has priority."""


class Serving(Struct, frozen=True, kw_only=True):
    """What to serve, and on which address."""

    events: Text
    """Path of the log."""
    address: Text
    port: Natural
    secret: Text
    loopback: bool
    """Whether the address is this machine's own."""
    before: Natural = 0
    """Bytes of the log that earlier processes of the run have written."""
    guest: GuestAbout | None = None
    """On a guest: the description of its part in the run."""
    planned_s: Finite | None = None
    planned_alone_s: Finite | None = None
    """Seconds of a step in a saved plan, with and without guests."""


class Opened(Struct, frozen=True, kw_only=True):
    """The answer: a port, or the error."""

    port: Natural = 0
    error: Text = ""
    taken: bool = False


def _say(opened: Opened) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(opened) + b"\n")
    sys.stdout.buffer.flush()


async def _run(serving: Serving) -> None:
    follower = Follower(
        Path(serving.events),
        lambda: PageState(serving.guest, serving.planned_s, serving.planned_alone_s),
        serving.before,
    )
    server = PageServer(follower, serving.secret, loopback=serving.loopback)
    try:
        listening = await asyncio.start_server(
            server.serve, serving.address, serving.port, limit=MOST_REQUEST_BYTES, backlog=AT_ONCE
        )
    except OSError as error:
        _say(Opened(error=error.strerror or str(error), taken=bool(serving.port)))
        return
    _say(Opened(port=listening.sockets[0].getsockname()[1]))
    loop = asyncio.get_running_loop()

    def hear() -> None:
        try:
            for line in sys.stdin.buffer:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # half a line: the pipe was full
                    server.hear(checked.decode(line, Pulse))  # without waking the loop
        finally:
            loop.call_soon_threadsafe(server.stop)

    threading.Thread(target=hear, daemon=True).start()
    async with listening:
        await server.follow()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process when it has ended
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    serving = checked.decode(sys.stdin.buffer.readline(), Serving)
    gc.freeze()  # the garbage collector need not look at what was imported
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(serving))
    os._exit(0)  # connections that are still open are not waited for


if __name__ == "__main__":
    main()
