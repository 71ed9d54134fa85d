"""How many files this process may open: owns raising the soft limit, so that strangers' connections leave room.

It must not know sockets. Every connection is an open file, and where there are no more, a host can neither let a
guest in nor write a checkpoint.
"""

from __future__ import annotations

import contextlib
import sys

WANTED_FILES = 8192
"""Enough for every connection a host lets wait and for all the files of a training. Not all that the system would
give: programs that still use select() break at numbers above 1023, and the closer the limit the sooner one sees."""
RESERVED_FILES = 512
"""For the training itself: data sets, checkpoints, libraries."""


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


def room_for_strangers(limit: int | None, most: int) -> int:
    """How many connections may wait at the door when this many files may be open."""
    if limit is None:
        return most
    return max(1, min(most, max(limit // 4, limit - RESERVED_FILES)))


def warning_of(limit: int | None, room: int, most: int) -> str | None:
    """What to tell the person at the host, where the room is less than it should be."""
    if limit is None or room >= most:
        return None
    return (
        f"only {limit} files may be open at once here, so no more than {room} connections can wait to be let in; "
        f"{most} should. To raise it: ulimit -n {WANTED_FILES}, then start again"
    )
