"""The life of one group of ranks: how it is formed, which collectives it uses, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

from potluck.dist.compression import Compressor
from potluck.dist.config import LOG_LEVELS, TRACE, Config, Resolved, ranks_text, resolve
from potluck.dist.engine import Engine
from potluck.dist.hierarchy import HierarchicalCollectives
from potluck.dist.local_collectives import LocalGroup
from potluck.dist.network_collectives import Collectives, NetworkCollectives
from potluck.dist.own_addresses import gather
from potluck.dist.peers import Peers
from potluck.dist.point_to_point import PointToPoint
from potluck.dist.queues import MessageQueues, RankState
from potluck.dist.record import Record
from potluck.dist.rendezvous import Membership, RankInfo, all_ready, meet, new_namespace
from potluck.errors import CollectiveError, ConfigError, PotluckError

_DRAIN_S = 2.0

log = logging.getLogger("potluck.dist")


class _SharedConnections:
    """The connections of this process, open while any group needs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: MessageQueues | None = None
        self._users = 0

    def take(self, settings: Resolved) -> MessageQueues:
        """The connections of this process. The first group decides their settings.

        Raises:
            ConfigError: the first group is not encrypted, and this one asks for encryption.
        """
        with self._lock:
            clear = self._queues is not None and not self._queues.connections.encrypts
            if clear and settings.encryption and settings.said_by.get("encryption", "default") != "default":
                raise ConfigError(
                    "this group asks for encryption, and the first group of this process has none",
                    hint="all groups of a process share their connections: turn it on for the first one too",
                )
            if self._queues is None:
                self._queues = MessageQueues(settings, socket.gethostname())
            self._users += 1
            return self._queues

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._queues is None:
                return
            queues, self._queues = self._queues, None
        queues.close()


_shared = _SharedConnections()
_open: list[Formation] = []
_at_end: Finalize | None = None
_of_parents: list[_SharedConnections] = []


class Formation:
    """One group, from this rank's side."""

    def __init__(
        self, rank: int, queues: MessageQueues, members: Membership, settings: Resolved, local: LocalGroup | None
    ) -> None:
        self.rank, self.world = rank, len(members.ranks)
        self._queues, self._members, self._local = queues, members, local
        self.settings, self._process = settings, os.getpid()
        self.peers = Peers(queues, members.group, rank, [info.endpoint for info in members.ranks], settings)
        compression = settings.compression
        self.network = NetworkCollectives(self.peers, Compressor(compression) if compression != "none" else None)
        self.collectives = self._chosen(local)
        self.point_to_point = PointToPoint(self.peers)
        self.engine = Engine(f"potluck-dist-{members.group & 0xFFFF:04x}")
        self.record = Record(f"{members.group & 0xFFFF:04x}", rank)
        self._lock = threading.Lock()
        self.sequence = 0
        self._closed = False
        queues.open(members.group, self._answer)

    def _chosen(self, local: LocalGroup | None) -> Collectives:
        machines = self._members.machines()
        if local is not None and len(machines) == 1:
            return local
        if self.settings.transport == "tcp" or len(machines) == self.world:
            return self.network
        firsts = [ranks[0] for ranks in machines]
        between = None
        if self.rank in firsts:
            between = NetworkCollectives(self.peers.between(firsts), self.network.compressor)
        return HierarchicalCollectives(self.network, local, between, machines)

    @property
    def number(self) -> int:
        """The group's random number, the same on all of its ranks."""
        return self._members.group

    def describe(self) -> str:
        """How the ranks are connected, for people."""
        machines = len(self._members.machines())
        if isinstance(self.collectives, LocalGroup):
            return "shared memory, without compression or encryption"
        encrypted = "encrypted TCP" if self.settings.encryption else "TCP without encryption"
        if isinstance(self.collectives, HierarchicalCollectives):
            return f"{encrypted} between {machines} machines, shared memory within"
        return encrypted

    # -- numbers --------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        with self._lock:
            self.sequence += 1
            return self.sequence

    def _answer(self) -> RankState:
        """The answer to another rank that asks why nothing arrives."""
        return RankState(sequence=self.sequence, where=self.record.where())

    # -- ending ---------------------------------------------------------------------------------------------

    def failed(self, call: str, error: BaseException) -> None:
        """A collective of this rank failed: tell the others not to wait for it."""
        known = isinstance(error, PotluckError)
        self.abort(str(error) if known else f"{call} failed on rank {self.rank}: {error!r}")

    def abort(self, text: str) -> None:
        self.peers.fail(text)
        if self._local is not None:
            self._local.abort(text)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # in a forked child: the group is its parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self.engine.drain(_DRAIN_S):
            self.abort(f"rank {self.rank} shut the group down before everything was done")
        self.engine.stop("the group was shut down")
        if self._local is not None:
            self._local.close()
        self.peers.close()
        self._queues.forget(self._members.group)
        with contextlib.suppress(ValueError):
            _open.remove(self)
        _shared.give_back()


def form(
    store: Any, rank: int, world: int, *, timeout_s: float, config: Config | None = None, within: int | None = None
) -> Formation:
    """Meet the other ranks and prepare for collectives with them.

    `within`: the number of the default group, if this is another one.
    """
    settings = _resolved(config, rank, world)
    deadline = time.monotonic() + timeout_s
    store = new_namespace(store, rank, world, within, timeout_s)

    def left_s() -> float:
        return max(1.0, deadline - time.monotonic())

    queues = _shared.take(settings)
    if settings.encryption != queues.connections.encrypts:
        said_by = {**settings.said_by, "encryption": "the first group of this process"}
        settings = replace(settings, encryption=queues.connections.encrypts, said_by=said_by)
    log.info("%s", settings.describe())
    try:
        mine = RankInfo.own(queues.endpoint, settings.shared())
        members = meet(store, rank, world, mine, left_s())
        queues.admit([info.endpoint for info in members.ranks])
        local = _local_group(store, rank, members, settings, left_s())
        formation = Formation(rank, queues, members, settings, local)
        all_ready(store, rank, world, left_s())
    except BaseException:
        _shared.give_back()
        raise
    log.info("rank %d of %d: %s", rank, world, formation.describe())
    for other, info in enumerate(members.ranks):
        log.debug("rank %d: rank %d is on %s at %s", rank, other, info.endpoint.host, info.endpoint.url)
    _open.append(formation)
    _remember_the_end()
    return formation


def _resolved(config: Config | None, rank: int, world: int) -> Resolved:
    if config is not None and not isinstance(config, Config):
        raise ConfigError(
            f"pg_options of the backend potluck must be a potluck.dist.Config, not {type(config).__name__}",
            hint='init_process_group("potluck", pg_options=potluck.dist.Config(compression="int8"))',
        )
    port = os.environ.get("MASTER_PORT", "")
    facts = gather(rank, world, os.environ.get("MASTER_ADDR"), int(port) if port.isdigit() else None)
    settings = resolve(config, os.environ, facts)
    logging.addLevelName(TRACE, "TRACE")
    log.setLevel(LOG_LEVELS[settings.log_level])
    if log.isEnabledFor(logging.INFO) and not log.hasHandlers():
        handler = logging.StreamHandler()  # the script has not set up logging
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
    return settings


def _local_group(
    store: Any, rank: int, members: Membership, settings: Resolved, timeout_s: float
) -> LocalGroup | None:
    """Shared memory between the ranks of this machine, if there are others and the settings allow it."""
    neighbours = members.neighbours(rank)
    world = len(members.ranks)
    if settings.transport == "shm" and len(neighbours) < world:
        far = [other for other in range(world) if other not in neighbours]
        raise CollectiveError(
            f"transport shm is for one machine, and {ranks_text(far)} cannot share memory with rank {rank}",
            hint="use transport auto: shared memory where it can be, TCP between machines",
        )
    if settings.transport == "tcp" or len(neighbours) < 2:
        return None
    names = [f"rank {other} ({members.ranks[other].endpoint.host})" for other in neighbours]
    return LocalGroup.create(
        store,
        f"potluck/local/{neighbours[0]}",
        neighbours.index(rank),
        len(neighbours),
        names=names,
        copy_threads=settings.copy_threads,
        timeout_s=timeout_s,
    )


def _remember_the_end() -> None:
    """Forked processes of multiprocessing end without the functions registered with atexit."""
    global _at_end
    if _at_end is None or not _at_end.still_active():
        _at_end = Finalize(None, _close_all, exitpriority=0)


def _forget_parents() -> None:
    """In a forked child: forget the parent's groups."""
    global _shared, _at_end
    _of_parents.append(_shared)  # kept, so that nothing of it is closed here
    _shared, _at_end = _SharedConnections(), None
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


@atexit.register
def _close_all() -> None:
    """For scripts that end without destroy_process_group(): their last messages must still be sent."""
    for formation in list(_open):
        with contextlib.suppress(Exception):
            formation.close()
