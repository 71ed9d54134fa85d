"""A page of its own in torch's store for each group: owns who is on it, and that no rank reads an old one.

It must not know what is written there.

The store outlives groups: a script destroys one and makes the next, torchrun restarts its processes, and torch
calls the new group by the old one's name. So the group's rank 0 opens a new page each time. The others come to the
newest on which they are not yet, and go on to a newer one until rank 0 says that all are there: an old page, where
rank 0 waited in vain, is left that way, and the ranks of one that was complete are on it already.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import psutil
from torch._C._distributed_c10d import PrefixStore

from potluck.dist import shm
from potluck.errors import CollectiveError, GuestsMissingError

_LOOK_S = 0.01
_NEWEST, _COMPLETE = "newest", "complete"


def new_page(store: Any, rank: int, world: int, within: int | None, timeout_s: float) -> Any:
    """The part of the store that is this group's alone, once all of its ranks are there.

    Args:
        within: the number of the default group, which its other groups have in common; None: this is that group.

    Raises:
        GuestsMissingError: it names the ranks that did not come.
        CollectiveError: another process has this rank.
    """
    book = PrefixStore("potluck/pages" if within is None else f"potluck/{within}/pages", store)
    deadline = time.monotonic() + timeout_s
    return _opened(book, world, deadline) if rank == 0 else _joined(book, rank, world, deadline)


def _opened(book: Any, world: int, deadline: float) -> Any:
    last = _read(book, _NEWEST)
    if last:
        _only_one(0, _read(PrefixStore(last, book), "here/0"))
    name = secrets.token_hex(8)
    page = PrefixStore(name, book)
    page.set("here/0", _signature())
    book.set(_NEWEST, name)
    wait_for(page, [f"here/{rank}" for rank in range(world)], deadline)
    page.set(_COMPLETE, "1")
    return page


def _joined(book: Any, rank: int, world: int, deadline: float) -> Any:
    seen, page, mine = "", None, _signature()
    while page is None or not page.check([_COMPLETE]):
        newest = _read(book, _NEWEST)
        if newest != seen:
            seen, page = newest, PrefixStore(newest, book)
            holder = page.compare_set(f"here/{rank}", "", mine).decode()
            if holder != mine:
                _only_one(rank, holder)
                page = None  # of a group before this one
        elif time.monotonic() > deadline:
            here = [f"here/{other}" for other in range(world)]
            # Without a page it is rank 0 that has not opened one.
            raise _missing(here[:1] if page is None else [key for key in here if not page.check([key])], world)
        else:
            time.sleep(_LOOK_S)
    return page


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _signature() -> str:
    """Of this process, and of this time."""
    return f"{secrets.token_hex(8)} {os.getpid()} {shm.neighbourhood()}"


def _only_one(rank: int, holder: str) -> None:
    """Refuse where a process of this machine that has signed as this rank is another one, and lives."""
    _, process, machine = [*holder.split(" ", 2), "", ""][:3]
    if not process.isdigit():
        return
    if machine == shm.neighbourhood() and int(process) != os.getpid() and psutil.pid_exists(int(process)):
        raise CollectiveError(
            f"rank {rank} is there twice: process {process} has it too",
            hint="give every process a RANK of its own, and a new store (or port) to every run",
        )


def wait_for(store: Any, keys: list[str], deadline: float) -> None:
    """Until all keys are there; those of the ranks end with their numbers."""
    left = deadline - time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=max(left, 0.001)))
    except RuntimeError as error:  # torch's DistStoreError is one
        missing = [key for key in keys if not store.check([key])]
        if not missing:
            raise
        raise _missing(missing, len(keys)) from error


def _missing(keys: list[str], world: int) -> GuestsMissingError:
    ranks = ", ".join(key.rpartition("/")[2] for key in keys)
    return GuestsMissingError(
        f"{'ranks' if len(keys) > 1 else 'rank'} {ranks} of {world} did not come to the process group in time",
        hint="look at the output of these ranks; do all have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?",
    )
