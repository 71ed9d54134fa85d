"""Lets the ranks of a group find each other through torch's store: owns what they write there.

Each rank writes where it receives messages, its public key, its machine, its protocol and its torch. The store
itself has no encryption and no authentication: everybody who can write to it can join. See docs/security.md.

The store outlives groups: a script destroys one and makes the next, torchrun restarts its processes, and torch
gives the new group the old one's name. So a group's rank 0 opens a new namespace each time. The others join the
newest one that they have not joined, and move to newer ones until rank 0 says that all have joined. In this way
they leave an old namespace that never became complete, and do not join a complete one twice.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import psutil
import torch
from torch._C._distributed_c10d import PrefixStore

from potluck import checked
from potluck._version import __version__
from potluck.bounds import Finite, Natural, Whole
from potluck.dist import shm
from potluck.dist.config import SharedSettings, disagreement, ranks_text
from potluck.dist.connections import Endpoint, ShortText, check_printable
from potluck.dist.queues import PROTOCOL
from potluck.errors import CollectiveError, GuestsMissingError, WireError

_POLL_S = 0.01
_NEWEST, _COMPLETE = "newest", "complete"

log = logging.getLogger("potluck.dist")


class _VersionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every protocol version has."""

    version: ShortText
    protocol: Natural

    def __post_init__(self) -> None:
        check_printable(self.version)


class RankInfo(_VersionFields, frozen=True, kw_only=True):
    """A rank's information about itself for the others."""

    endpoint: Endpoint
    machine: ShortText
    """Equal for ranks that can share memory."""
    shared: Annotated[dict[ShortText, bool | Whole | Finite | ShortText | None], msgspec.Meta(max_length=256)]
    """The settings that must be the same on all ranks."""
    torch: ShortText

    def __post_init__(self) -> None:
        check_printable(self.version, self.machine, self.torch, *self.shared.values())

    @classmethod
    def own(cls, endpoint: Endpoint, shared: SharedSettings) -> RankInfo:
        return cls(
            version=__version__,
            protocol=PROTOCOL,
            endpoint=endpoint,
            machine=shm.neighbourhood(),
            shared=shared,
            torch=str(torch.__version__),
        )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes, rank: int) -> RankInfo:
        """A rank's entry in the store."""
        try:
            theirs = checked.decode(text, _VersionFields)
            if theirs.protocol == PROTOCOL:
                return checked.decode(text, cls)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise WireError(
                f"the store does not hold the address of rank {rank}",
                hint="do all ranks run the same version of potluck? Has somebody else written to the store?",
            ) from None
        raise CollectiveError(
            f"rank {rank} runs potluck {theirs.version} (protocol {theirs.protocol}), this one {__version__} "
            f"(protocol {PROTOCOL})",
            hint="install the same version of potluck on all machines",
        )


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rendezvous: the group's random number, and every rank."""

    group: int
    ranks: list[RankInfo]

    def machines(self) -> list[list[int]]:
        """The ranks of each machine, in the order of their first ones."""
        by_machine: dict[str, list[int]] = {}
        for rank, info in enumerate(self.ranks):
            by_machine.setdefault(info.machine, []).append(rank)
        return list(by_machine.values())

    def neighbours(self, rank: int) -> list[int]:
        """The ranks on the same machine, itself included."""
        return next(ranks for ranks in self.machines() if rank in ranks)


def meet(store: Any, rank: int, world: int, mine: RankInfo, timeout_s: float) -> Membership:
    """Write this rank's info and read the others'.

    Raises GuestsMissingError, which names the missing ranks, or CollectiveError if a rank has another version or
    other settings, or no key where one is required.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        store.set("potluck/group", str(secrets.randbits(63)))
    store.set(f"potluck/rank/{rank}", mine.to_json())
    keys = [f"potluck/rank/{other}" for other in range(world)]
    _wait_for(store, keys, deadline)
    ranks = [RankInfo.from_json(store.get(key), other) for other, key in enumerate(keys)]
    error = disagreement({other: info.shared for other, info in enumerate(ranks)})
    if error is None and mine.endpoint.key:
        error = _without_key(ranks)
    if error is not None:
        raise error
    _compare_torch(rank, ranks)
    number = store.get("potluck/group")
    if not number.isdigit() or len(number) > 19:
        raise WireError("the store holds no number for the group", hint="has somebody else written to the store?")
    return Membership(group=int(number), ranks=ranks)


def _without_key(ranks: list[RankInfo]) -> CollectiveError | None:
    """The error if a rank sent no key: somebody who can write to the store must not turn encryption off."""
    without = [rank for rank, info in enumerate(ranks) if not info.endpoint.has_key]
    if not without:
        return None
    return CollectiveError(
        f"{ranks_text(without)} sent no key, and encryption is on",
        hint="nothing is sent unencrypted: has somebody else written to the store? To disable encryption, set "
        "POTLUCK_DIST_ENCRYPTION=0 on all ranks",
    )


def _compare_torch(rank: int, ranks: list[RankInfo]) -> None:
    """Warn of versions that differ in more than the last number. None is refused: dtypes and shapes are compared at
    each collective, and nothing that only one version of torch can read is sent."""
    sides: dict[str, list[int]] = {}
    for other, info in enumerate(ranks):
        sides.setdefault(".".join(info.torch.partition("+")[0].split(".")[:2]), []).append(other)
    if len(sides) > 1:
        text = "; ".join(f"{version} on {ranks_text(who)}" for version, who in sides.items())
        level = logging.WARNING if rank == 0 else logging.INFO
        log.log(level, "the ranks have different versions of torch, and may compute differently: %s", text)


def all_ready(store: Any, rank: int, world: int, timeout_s: float) -> None:
    """Wait until every rank accepts messages. No rank may send before that."""
    store.set(f"potluck/ready/{rank}", "1")
    _wait_for(store, [f"potluck/ready/{other}" for other in range(world)], time.monotonic() + timeout_s)


# -- a namespace in the store for each group


def new_namespace(store: Any, rank: int, world: int, within: int | None, timeout_s: float) -> Any:
    """The part of the store that only this group uses, once all of its ranks have joined.

    `within`: the number of the default group, which its other groups have in common; None: this is that group.

    Raises GuestsMissingError, which names the missing ranks, or CollectiveError if another process has this rank.
    """
    root = PrefixStore("potluck/groups" if within is None else f"potluck/{within}/groups", store)
    deadline = time.monotonic() + timeout_s
    return _open(root, world, deadline) if rank == 0 else _join(root, rank, world, deadline)


def _open(root: Any, world: int, deadline: float) -> Any:
    last = _read(root, _NEWEST)
    if last:
        _check_single(0, _read(PrefixStore(last, root), "here/0"))
    name = secrets.token_hex(8)
    namespace = PrefixStore(name, root)
    namespace.set("here/0", _signature())
    root.set(_NEWEST, name)
    _wait_for(namespace, [f"here/{rank}" for rank in range(world)], deadline)
    namespace.set(_COMPLETE, "1")
    return namespace


def _join(root: Any, rank: int, world: int, deadline: float) -> Any:
    seen, namespace, mine = "", None, _signature()
    while namespace is None or not namespace.check([_COMPLETE]):
        newest = _read(root, _NEWEST)
        if newest != seen:
            seen, namespace = newest, PrefixStore(newest, root)
            holder = namespace.compare_set(f"here/{rank}", "", mine).decode()
            if holder != mine:
                _check_single(rank, holder)
                namespace = None  # of an earlier group
        elif time.monotonic() > deadline:
            here = [f"here/{other}" for other in range(world)]
            # Without a namespace it is rank 0 that has not opened one.
            absent = here[:1] if namespace is None else [key for key in here if not namespace.check([key])]
            raise _missing(absent, world)
        else:
            time.sleep(_POLL_S)
    return namespace


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _signature() -> str:
    """Identifies this process and this attempt."""
    return f"{secrets.token_hex(8)} {os.getpid()} {shm.neighbourhood()}"


def _check_single(rank: int, holder: str) -> None:
    """Raise an error if another living process of this machine uses this rank."""
    _, process, machine = [*holder.split(" ", 2), "", ""][:3]
    if not process.isdigit():
        return
    if machine == shm.neighbourhood() and int(process) != os.getpid() and psutil.pid_exists(int(process)):
        raise CollectiveError(
            f"rank {rank} exists twice: process {process} has it too",
            hint="give every process a RANK of its own, and a new store (or port) to every run",
        )


def _wait_for(store: Any, keys: list[str], deadline: float) -> None:
    """Wait until all keys are set. A rank's key ends with its number."""
    left = deadline - time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=max(left, 0.001)))
    except RuntimeError as error:  # torch's DistStoreError is one
        missing = [key for key in keys if not store.check([key])]
        if not missing:
            raise
        raise _missing(missing, len(keys)) from error


def _missing(keys: list[str], world: int) -> GuestsMissingError:
    ranks = ranks_text([int(key.rpartition("/")[2]) for key in keys])
    return GuestsMissingError(
        f"{ranks} of {world} did not join the process group in time",
        hint="look at the output of these ranks; do all have the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?",
    )
