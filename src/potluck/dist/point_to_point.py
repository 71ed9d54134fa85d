"""send() and recv() between two ranks: owns which receive gets which message.

There is no background thread: a thread that waits for one receive serves all receives of the group.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.dist.arguments import check_rank
from potluck.dist.channel import chunks, raw
from potluck.dist.counting import METRICS, SPENT
from potluck.dist.host_tensors import from_host, to_host
from potluck.dist.peers import Peers, gone_hint, unusable
from potluck.dist.queues import Aborted, DeadlinePassed, Kind, PeerGone
from potluck.dist.work import PotluckWork
from potluck.errors import CollectiveError, CollectiveTimeoutError, RankGoneError


@dataclass(slots=True)
class _Receive:
    """A receive that waits for its message."""

    work: PotluckWork
    tensor: Tensor
    source: int | None
    tag: int
    deadline: float


class PointToPoint:
    """The point-to-point messages of one group."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._wanted: list[_Receive] = []
        self._taken: set[tuple[int, int]] = set()
        """(source, tag) of messages that a thread is receiving; it also gets their next parts."""

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Queue a copy of the tensor; never waits for the other rank."""
        peers = self._peers
        peers.check()
        check_rank("send", to, peers.world)
        if to == peers.rank:
            raise CollectiveError(f"rank {to} cannot send to itself", hint="copy the tensor instead")
        total = tensor.numel() * tensor.element_size()
        about = f"{tensor.dtype}|{tuple(tensor.shape)}".encode()
        with METRICS.op("send", total):
            view = raw(to_host(tensor).reshape(-1))
            for start, stop in chunks(total, peers.settings.chunk_bytes):
                label = (Kind.POINT_TO_POINT, peers.group, tag)
                peers.queues.send(peers.endpoints[to], label, view[start:stop], about=about, total=total)
            SPENT.sent += total

    # -- receiving ------------------------------------------------------------------------------------------

    def post(self, work: PotluckWork, tensor: Tensor, source: int | None, tag: int, timeout_s: float) -> None:
        """Request the next message from a rank, or from any."""
        check_rank("recv", source, self._peers.world)
        wanted = _Receive(work, tensor, source, tag, time.monotonic() + timeout_s)
        with self._peers.queues.lock:
            self._wanted.append(wanted)
        work.progress = lambda until: self._progress(wanted, until)

    def _progress(self, mine: _Receive, until: float | None) -> None:
        """Serve all receives until this one is done or `until` has passed."""
        peers = self._peers
        while not mine.work.finished:
            end = mine.deadline if until is None else min(until, mine.deadline)
            sources = peers.others if mine.source is None else [peers.endpoints[mine.source]]
            try:
                found = peers.queues.wait(lambda: self._next(mine), peers.group, sources, end)
            except DeadlinePassed:
                if time.monotonic() <= mine.deadline:
                    return
                self._drop(mine, self._late(mine))
                return
            except PeerGone as gone:
                text = f"recv: {peers.who(peers.rank_of(gone.name))} {gone.reason}"
                self._drop(mine, RankGoneError(text, hint=gone_hint(gone.reason)))
                return
            except Aborted as aborted:
                self._drop(mine, unusable(str(aborted)))
                return
            if isinstance(found, tuple):
                self._serve(*found)

    def _next(self, mine: _Receive) -> tuple[_Receive, int] | bool | None:
        """The first receive whose message has arrived; called with the lock held."""
        if mine.work.finished:
            return True
        seen: set[tuple[int | None, int]] = set()
        for wanted in self._wanted:
            key = (wanted.source, wanted.tag)
            if key in seen or (None, wanted.tag) in seen:
                continue
            source = self._ready(wanted)
            if source is not None:
                self._wanted.remove(wanted)
                self._taken.add((source, wanted.tag))
                return wanted, source
            seen.add(key)
        return None

    def _ready(self, wanted: _Receive) -> int | None:
        peers = self._peers
        names = (
            peers.queues.sources(peers.group, wanted.tag)
            if wanted.source is None
            else [peers.endpoints[wanted.source].name]
        )
        for name in names:
            source = peers.rank_of(name)
            if (source, wanted.tag) not in self._taken and peers.queues.has_message(peers.group, name, wanted.tag):
                return source
        return None

    def _serve(self, wanted: _Receive, source: int) -> None:
        failed: Exception | None = None
        try:
            with METRICS.op("recv", wanted.tensor.numel() * wanted.tensor.element_size()):
                from_host(self._collect(wanted, source), wanted.tensor)
        except (PeerGone, DeadlinePassed, Aborted) as error:
            failed = RankGoneError(f"recv from {self._peers.who(source)} failed: {error}")
        except Exception as error:
            failed = error
        finally:
            with self._peers.queues.lock:
                self._taken.discard((source, wanted.tag))
                self._peers.queues.notify()
        # Last: callbacks of the future may wait for the next message of the same rank.
        wanted.work.complete(failed, source=-1 if failed else source)

    def _collect(self, wanted: _Receive, source: int) -> Tensor:
        peers = self._peers
        out = torch.empty(wanted.tensor.numel(), dtype=wanted.tensor.dtype)
        target, offset, about, total = raw(out), 0, b"", 0
        while True:
            message = peers.queues.take(
                peers.group, peers.endpoints[source], wanted.tag, wanted.deadline, kind=Kind.POINT_TO_POINT
            )
            view, about, total = message.view, message.about, message.total
            if offset + len(view) <= len(target):
                target[offset : offset + len(view)] = view
            offset += len(view)
            if offset >= total:
                break
        kind = about.decode("utf-8", "replace").partition("|")[0]
        if total != len(target) or kind != str(wanted.tensor.dtype):
            theirs = about.decode("utf-8", "replace").replace("|", " ")
            raise CollectiveError(
                f"recv: {peers.who(source)} sent {theirs}, which does not fit into "
                f"{wanted.tensor.dtype} {tuple(wanted.tensor.shape)}",
                hint="sender and receiver must agree on the size and the type of the tensor",
            )
        return out

    def _drop(self, wanted: _Receive, error: Exception) -> None:
        with self._peers.queues.lock:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        wanted.work.complete(error)

    def _late(self, wanted: _Receive) -> CollectiveTimeoutError:
        whom = "any rank" if wanted.source is None else self._peers.who(wanted.source)
        return CollectiveTimeoutError(
            f"recv: nothing came from {whom} with tag {wanted.tag} in time",
            hint="does that rank send, to this rank, in this group, with this tag?",
        )
