"""Everything that one group of ranks has: owns its making, its paths and its end.

It must not know torch's process groups, nor tensors beyond handing them on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from typing import Any

from potluck.dist.engine import Engine
from potluck.dist.lane import Lane, Terms
from potluck.dist.links import LinkSettings
from potluck.dist.local import LocalGroup
from potluck.dist.mailroom import Mailroom
from potluck.dist.mesh import Aborted, DeadlinePassed, Mesh, PeerGone
from potluck.dist.paths import Call, LocalPath, MeshPath, Path
from potluck.dist.rendezvous import Card, Meeting, all_ready, meet
from potluck.errors import CollectiveError, CollectiveTimeoutError
from potluck.wire import shm

_DRAIN_S = 2.0


class _Shared:
    """The mail of this process, while any group needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._users = 0

    def take(self, settings: LinkSettings) -> Mesh:
        with self._lock:
            if self._mesh is None:
                self._mesh = Mesh(settings, host=socket.gethostname())
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


class Formation:
    """The ranks of one group as they stand, from this rank's side."""

    def __init__(self, rank: int, mesh: Mesh, meeting: Meeting, local: LocalGroup | None) -> None:
        self.rank, self.world = rank, len(meeting.cards)
        self._mesh, self._meeting, self._local = mesh, meeting, local
        self.lane = Lane(mesh, meeting.group, rank, [card.endpoint for card in meeting.cards], meeting.terms)
        self.path: Path = MeshPath(self.lane) if local is None else LocalPath(local)
        self.mailroom = Mailroom(self.lane)
        self.engine = Engine(f"potluck-dist-{meeting.group & 0xFFFF:04x}")
        self._lock = threading.Lock()
        self.sequence = 0
        self._last = "nothing"
        self._finished = 0
        self._closed = False
        mesh.open(meeting.group, self._stand)

    def describe(self) -> str:
        return "shared memory" if self._local is not None else "mail"

    # -- numbers --------------------------------------------------------------------------------------------

    def next_sequence(self, about: str) -> int:
        with self._lock:
            self.sequence += 1
            self._last = f"#{self.sequence} {about.replace('|', ' ')}"
            return self.sequence

    def finished(self, sequence: int) -> None:
        self._finished = sequence

    def _stand(self) -> dict[str, Any]:
        """For another rank that asks why nothing comes."""
        return {"sequence": self.sequence, "finished": self._finished, "last": self._last}

    # -- ending ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.lane.check()

    def abort(self, text: str) -> None:
        self.lane.fail(text)
        if self._local is not None:
            self._local.abort(text)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self.engine.drain(_DRAIN_S):
            self.abort(f"rank {self.rank} shut the group down before all was done")
        self.engine.stop("the group was shut down")
        if self._local is not None:
            self._local.close()
        self._mesh.forget(self._meeting.group)
        with contextlib.suppress(ValueError):
            _open.remove(self)
        _shared.give_back()

    # -- a barrier that tells who is missing ----------------------------------------------------------------

    def monitored_barrier(self, call: Call, wait_all_ranks: bool) -> None:
        from potluck.dist.lane import Trip

        trip = Trip(self.lane, call.sequence, call.about, call.deadline)
        empty = memoryview(b"")
        if self.rank != 0:
            trip.send_part(0, empty)
            trip.take(0)
            return
        missing: list[int] = []
        for rank in range(1, self.world):
            try:
                self._mesh.take(self.lane.group, self.lane.endpoints[rank], call.sequence, call.deadline)
            except (DeadlinePassed, PeerGone):
                missing.append(rank)
                if not wait_all_ranks:
                    break
            except Aborted as aborted:
                raise CollectiveError(str(aborted)) from None
        if missing:
            named = ", ".join(self.lane.who(rank) for rank in missing)
            text = f"monitored_barrier #{call.sequence}: {named} did not come in time"
            self.lane.fail(text)
            raise CollectiveTimeoutError(text, hint="look at what these ranks do")
        for rank in range(1, self.world):
            trip.send_part(rank, empty)


def form(store: Any, rank: int, world: int, *, timeout_s: float, config: Any = None) -> Formation:
    """Meet the other ranks and make ready for collectives with them."""
    began = time.monotonic()

    def left_s() -> float:
        return max(1.0, timeout_s - (time.monotonic() - began))

    mesh = _shared.take(_settings())
    try:
        machine = shm.neighbourhood()
        mine = Card(endpoint=mesh.endpoint, machine=machine, terms=Terms())
        meeting = meet(store, rank, world, mine, left_s())
        mesh.admit([card.endpoint for card in meeting.cards])
        local = _local_group(store, rank, meeting, left_s())
        formation = Formation(rank, mesh, meeting, local)
        all_ready(store, rank, world, left_s())
    except BaseException:
        _shared.give_back()
        raise
    _open.append(formation)
    return formation


def _local_group(store: Any, rank: int, meeting: Meeting, timeout_s: float) -> LocalGroup | None:
    neighbours = meeting.neighbours(rank)
    world = len(meeting.cards)
    if len(neighbours) < world or world < 2 or os.environ.get("POTLUCK_DIST_TRANSPORT") == "tcp":
        return None
    names = [f"rank {other} ({meeting.cards[other].endpoint.host})" for other in neighbours]
    return LocalGroup.create(
        store, "potluck/local", neighbours.index(rank), len(neighbours), names=names, timeout_s=timeout_s
    )


def _settings() -> LinkSettings:
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))
            address = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    return LinkSettings(address=address, avoid_port=int(os.environ.get("MASTER_PORT", "0") or 0))


@atexit.register
def _close_all() -> None:
    """Scripts that end without destroy_process_group(): what they sent last must still go out."""
    for formation in list(_open):
        with contextlib.suppress(Exception):
            formation.close()
