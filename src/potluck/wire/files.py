"""How many files this process may open: owns raising the soft limit, and what a host's door may take of them.

Every connection is an open file, and where there are no more, a host can neither let a guest in nor write a
checkpoint.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

import psutil

from potluck.errors import ConfigError
from potluck.spec.config import MOST_GUESTS

WANTED_FILES = 8192
"""Enough for every connection a host lets wait and for all the files of a training. Not all that the system would
give: programs that still use select() break at numbers above 1023, and the closer the limit the sooner one sees."""
FEWEST_FILES = 256
"""With fewer, a host does not listen."""
RESERVED_FILES = 512
"""For the training itself: data sets, checkpoints, libraries. At most half of the limit."""
FEWEST_AT_DOOR = 56
"""Three guests, and some who wait: with fewer left, a host does not listen."""
_HINT = f"raise the limit first: ulimit -n {WANTED_FILES}"


@dataclass(frozen=True, slots=True)
class Room:
    """Connections that a host may have open at the same time."""

    waiting: int = 1024
    """Of those who have not shown a key. Holding one costs a host some 20 kB and a file; closing one that is opened
    again at once costs it time, so there is room for more than are ever honestly there."""
    inside: int = 256
    """Of those who hold the key: two for each guest, and as many again for guests that come back before their old
    ones are known to be dead."""
    batch: int = 128
    """Accepted at once, before they are counted."""


def make_room() -> int | None:
    """Raise the soft limit to WANTED_FILES where the hard one allows; what holds now, None: there is no limit."""
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
    """Files that this process has open."""
    return 0 if sys.platform == "win32" else psutil.Process().num_fds()


def room_at_door(limit: int | None, in_use: int) -> Room:
    """What the door may take where `limit` files may be open and `in_use` are; ConfigError: too little."""
    most = Room()
    if limit is None:
        return most
    if limit < FEWEST_FILES:
        raise ConfigError(
            f"only {limit} files may be open at once here, and a host needs at least {FEWEST_FILES} to listen",
            hint=_HINT,
        )
    left = limit - in_use - min(RESERVED_FILES, limit // 2)
    if left < FEWEST_AT_DOOR:
        raise ConfigError(
            f"{in_use} of {limit} files that may be open at once are open already: too few are left to listen",
            hint=_HINT,
        )
    batch, inside = min(most.batch, left // 5), min(most.inside, left // 4)
    return Room(waiting=min(most.waiting, left - batch - inside), inside=inside, batch=batch)


def warning_of(limit: int | None, room: Room) -> str | None:
    """What to tell the person at the host, where the room is less than it should be."""
    most = Room()
    if limit is None or room == most:
        return None
    return (
        f"only {limit} files may be open at once here, so no more than {min(room.inside // 2, MOST_GUESTS)} guests "
        f"can take part and {room.waiting} connections wait to be let in; {MOST_GUESTS} and {most.waiting} should. "
        f"To raise it: ulimit -n {WANTED_FILES}, then start again"
    )
