"""The limit on open files: raises the soft limit, and decides how many of them connections may use.

Every connection is an open file. If none are left, a host can neither admit a guest nor write a checkpoint.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

import psutil

from potluck.errors import ConfigError
from potluck.spec.config import MOST_GUESTS

WANTED_FILES = 8192
"""Enough for every connection of a host and all files of a training. It is not the system's maximum, because
programs that use select() fail at descriptors above 1023, and a lower limit shows that sooner."""
FEWEST_FILES = 256
"""The fewest open files with which a host listens."""
RESERVED_FILES = 512
"""Files kept for the training itself (data sets, checkpoints, libraries); at most half of the limit."""
FEWEST_CONNECTIONS = 40
"""The fewest connections with which a host listens: a few guests, and some unauthenticated ones."""
_OF_ZEROMQ = 24
"""Files that ZeroMQ and its threads open themselves."""
_HINT = f"raise the limit first: ulimit -n {WANTED_FILES}"


@dataclass(frozen=True, slots=True)
class Room:
    """Connections that a host may have open at the same time."""

    waiting: int = 1024
    """The most unauthenticated connections. Each costs a host some 20 kB and a file; closing one that is opened
    again at once costs time, so the limit is higher than honest peers need."""
    inside: int = 256
    """The most authenticated connections: two for each guest, and as many again for guests that reconnect before
    their old connections are known to be dead."""
    batch: int = 128
    """The most connections accepted at once, before they are counted."""


def make_room() -> int | None:
    """Raise the soft limit to WANTED_FILES if the hard limit allows; returns the limit, None if there is none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft >= WANTED_FILES:
        return soft
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    # macOS names a hard limit beyond the one it keeps to, and containers may forbid any change.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_now() -> int:
    """Number of files that this process has open."""
    return 0 if sys.platform == "win32" else psutil.Process().num_fds()


def connection_room(limit: int | None, in_use: int) -> Room:
    """The limits on connections, given `limit` open files of which `in_use` are open; ConfigError if too few."""
    most = Room()
    if limit is None:
        return most
    if limit < FEWEST_FILES:
        raise ConfigError(
            f"only {limit} files may be open at once here, and a host needs at least {FEWEST_FILES} to listen",
            hint=_HINT,
        )
    left = limit - in_use - _OF_ZEROMQ - min(RESERVED_FILES, limit // 2)
    if left < FEWEST_CONNECTIONS:
        raise ConfigError(
            f"{in_use} of {limit} files that may be open at once are open already: too few are left to listen",
            hint=_HINT,
        )
    batch, inside = min(most.batch, left // 5), min(most.inside, left // 4)
    return Room(waiting=min(most.waiting, left - batch - inside), inside=inside, batch=batch)


def warning_of(limit: int | None, room: Room) -> str | None:
    """A warning for the user of the host if the limits are lower than they should be."""
    most = Room()
    if limit is None or room == most:
        return None
    return (
        f"only {limit} files may be open at once here, so no more than {min(room.inside // 2, MOST_GUESTS)} guests "
        f"can take part and {room.waiting} connections can be pending; {MOST_GUESTS} and {most.waiting} should. "
        f"To raise it: ulimit -n {WANTED_FILES}, then start again"
    )
