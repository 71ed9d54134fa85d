"""Everything that one group of ranks has: owns its making, its paths and its end.

It must not know torch's process groups, nor tensors beyond handing them on.
"""

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

from potluck.dist import shm
from potluck.dist.compression import Compressor
from potluck.dist.config import LOG_LEVELS, TRACE, Config, Resolved, ranks_text, resolve
from potluck.dist.engine import Engine
from potluck.dist.facts import gather
from potluck.dist.hierarchy import HierarchicalPath
from potluck.dist.lane import Call, Lane, Terms, Trip
from potluck.dist.links import LinkSettings
from potluck.dist.local import LocalGroup
from potluck.dist.mailroom import Mailroom
from potluck.dist.mesh import Aborted, DeadlinePassed, Mesh, PeerGone
from potluck.dist.pages import new_page
from potluck.dist.paths import CollectivePath, LocalPath, MeshPath
from potluck.dist.record import Header, Record
from potluck.dist.rendezvous import Card, Meeting, all_ready, meet
from potluck.errors import CollectiveError, CollectiveTimeoutError, ConfigError, PotluckError

_DRAIN_S = 2.0

log = logging.getLogger("potluck.dist")


class _Shared:
    """The mail of this process, while any group needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._users = 0

    def take(self, settings: Resolved) -> Mesh:
        """Its settings are those of the group that came first.

        Raises:
            ConfigError: that group is in the clear, and encryption was asked for since.
        """
        with self._lock:
            clear = self._mesh is not None and not self._mesh.links.encrypts
            if clear and settings.encryption and settings.said_by.get("encryption", "default") != "default":
                raise ConfigError(
                    "this group asks for encryption, and the first group of this process has none",
                    hint="all groups of a process share their connections: turn it on for the first one too",
                )
            if self._mesh is None:
                links = LinkSettings(
                    address=settings.address,
                    port=settings.port,
                    door_port=settings.door_port,
                    encrypt=settings.encryption,
                    heartbeat_s=settings.heartbeat_s,
                    heartbeat_timeout_s=settings.heartbeat_timeout_s,
                    connect_s=settings.connect_timeout_s,
                )
                self._mesh = Mesh(links, host=socket.gethostname(), checksum=settings.checksum)
            self._users += 1
            return self._mesh

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._mesh is None:
                return
            mesh, self._mesh = self._mesh, None
        mesh.close()


_shared = _Shared()
_open: list[Formation] = []
_at_end: Finalize | None = None
_of_parents: list[_Shared] = []


class Formation:
    """The ranks of one group as they stand, from this rank's side."""

    def __init__(
        self, rank: int, mesh: Mesh, meeting: Meeting, settings: Resolved, local: LocalGroup | None
    ) -> None:
        self.rank, self.world = rank, len(meeting.cards)
        self._mesh, self._meeting, self._local = mesh, meeting, local
        self.settings, self._process = settings, os.getpid()
        terms = Terms(
            chunk_bytes=settings.chunk_bytes,
            small_bytes=settings.small_bytes,
            streams=not settings.checksum,
            algorithm=settings.algorithm,
        )
        self.lane = Lane(mesh, meeting.group, rank, [card.endpoint for card in meeting.cards], terms)
        self.path = self._path(local)
        self.mailroom = Mailroom(self.lane)
        self.engine = Engine(f"potluck-dist-{meeting.group & 0xFFFF:04x}")
        self.record = Record(f"{meeting.group & 0xFFFF:04x}", rank)
        self._lock = threading.Lock()
        self.sequence = 0
        self._closed = False
        mesh.open(meeting.group, self._stand)

    def _path(self, local: LocalGroup | None) -> CollectivePath:
        machines = self._meeting.machines()
        if local is not None and len(machines) == 1:
            return LocalPath(local)
        packing = self.settings.compression
        mail = MeshPath(self.lane, Compressor(packing) if packing != "none" else None)
        if self.settings.transport == "tcp" or len(machines) == self.world:
            return mail
        firsts = [ranks[0] for ranks in machines]
        between = MeshPath(self.lane.between(firsts), mail.compressor) if self.rank in firsts else None
        return HierarchicalPath(mail, None if local is None else LocalPath(local), between, machines)

    @property
    def number(self) -> int:
        """The group's own, the same on all of its ranks."""
        return self._meeting.group

    def describe(self) -> str:
        """For people: how the ranks are connected."""
        machines = len(self._meeting.machines())
        if isinstance(self.path, LocalPath):
            return "shared memory, where nothing is packed or encrypted"
        encrypted = "encrypted TCP" if self.settings.encryption else "TCP in the clear"
        if isinstance(self.path, HierarchicalPath):
            return f"{encrypted} between {machines} machines, shared memory within"
        return encrypted

    # -- numbers --------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        with self._lock:
            self.sequence += 1
            return self.sequence

    def _stand(self) -> dict[str, Any]:
        """For another rank that asks why nothing comes."""
        return {"sequence": self.sequence, "where": self.record.where()}

    # -- ending ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.lane.check()

    def failed(self, header: Header, error: BaseException) -> None:
        """A collective of this rank did not end as it should: the others must not wait for it."""
        text = (
            str(error)
            if isinstance(error, PotluckError)
            else f"{header.op} #{header.seq} failed on rank {self.rank}: {error!r}"
        )
        self.abort(text)

    def abort(self, text: str) -> None:
        self.lane.fail(text)
        if self._local is not None:
            self._local.abort(text)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child's copy: the group is its parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self.engine.drain(_DRAIN_S):
            self.abort(f"rank {self.rank} shut the group down before all was done")
        self.engine.stop("the group was shut down")
        if self._local is not None:
            self._local.close()
        self.lane.close()
        self._mesh.forget(self._meeting.group)
        with contextlib.suppress(ValueError):
            _open.remove(self)
        _shared.give_back()

    # -- a barrier that tells who is missing ----------------------------------------------------------------

    def monitored_barrier(self, call: Call, wait_all_ranks: bool) -> None:
        trip = Trip(self.lane, call)
        empty = memoryview(b"")
        if self.rank != 0:
            trip.send_part(0, empty)
            trip.take(0)
            return
        missing: list[int] = []
        for rank in range(1, self.world):
            try:
                self._mesh.take(self.lane.group, self.lane.endpoints[rank], call.header.seq, call.deadline)
            except (DeadlinePassed, PeerGone):
                missing.append(rank)
                if not wait_all_ranks:
                    break
            except Aborted as aborted:
                raise CollectiveError(str(aborted)) from None
        if missing:
            named = ", ".join(self.lane.who(rank) for rank in missing)
            # The first words are gloo's: scripts look for them.
            text = f"Rank 0 timed out in monitoredBarrier #{call.header.seq}: {named} did not come in time"
            self.lane.fail(text)
            raise CollectiveTimeoutError(text, hint="look at what these ranks do")
        for rank in range(1, self.world):
            trip.send_part(rank, empty)


def form(
    store: Any, rank: int, world: int, *, timeout_s: float, config: Config | None = None, within: int | None = None
) -> Formation:
    """Meet the other ranks and make ready for collectives with them.

    Args:
        within: the number of the default group, where this is another one.
    """
    settings = _resolved(config, rank, world)
    deadline = time.monotonic() + timeout_s
    store = new_page(store, rank, world, within, timeout_s)

    def left_s() -> float:
        return max(1.0, deadline - time.monotonic())

    mesh = _shared.take(settings)
    if settings.encryption != mesh.links.encrypts:
        said_by = {**settings.said_by, "encryption": "the first group of this process"}
        settings = replace(settings, encryption=mesh.links.encrypts, said_by=said_by)
    log.info("%s", settings.describe())
    try:
        mine = Card(endpoint=mesh.endpoint, machine=shm.neighbourhood(), shared=settings.shared())
        meeting = meet(store, rank, world, mine, left_s())
        mesh.admit([card.endpoint for card in meeting.cards])
        local = _local_group(store, rank, meeting, settings, left_s())
        formation = Formation(rank, mesh, meeting, settings, local)
        all_ready(store, rank, world, left_s())
    except BaseException:
        _shared.give_back()
        raise
    log.info("rank %d of %d: %s", rank, world, formation.describe())
    for other, card in enumerate(meeting.cards):
        log.debug("rank %d: rank %d is on %s at %s", rank, other, card.endpoint.host, card.endpoint.url)
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
        handler = logging.StreamHandler()  # the script has not said where words go
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
    return settings


def _local_group(
    store: Any, rank: int, meeting: Meeting, settings: Resolved, timeout_s: float
) -> LocalGroup | None:
    """Shared memory between the ranks of this machine, where there are others and it is wanted."""
    neighbours = meeting.neighbours(rank)
    world = len(meeting.cards)
    if settings.transport == "shm" and len(neighbours) < world:
        far = [other for other in range(world) if other not in neighbours]
        raise CollectiveError(
            f"transport shm is for one machine, and {ranks_text(far)} cannot share memory with rank {rank}",
            hint="use transport auto: shared memory where it can be, TCP between machines",
        )
    if settings.transport == "tcp" or len(neighbours) < 2:
        return None
    names = [f"rank {other} ({meeting.cards[other].endpoint.host})" for other in neighbours]
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
    """Processes of multiprocessing that were forked end without what is registered with atexit."""
    global _at_end
    if _at_end is None or not _at_end.still_active():
        _at_end = Finalize(None, _close_all, exitpriority=0)


def _forget_parents() -> None:
    """In a forked child: its parent's groups are the parent's, and end with it."""
    global _shared, _at_end
    _of_parents.append(_shared)  # kept, so that nothing of it is closed here
    _shared, _at_end = _Shared(), None
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


@atexit.register
def _close_all() -> None:
    """Scripts that end without destroy_process_group(): what they sent last must still go out."""
    for formation in list(_open):
        with contextlib.suppress(Exception):
            formation.close()
