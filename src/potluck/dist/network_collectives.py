"""Collectives over the network: owns which rank sends what to which, with flat tensors in host memory.

Larger reductions use owners: each rank owns a part of the tensor, receives that part from all others, adds it to
its own in the working dtype in the order of the ranks, and sends the result on, chunk by chunk. That is a ring's
traffic, 2(N-1)/N of the tensor for each rank, in two hops instead of 2(N-1), and all ranks get the same bits.

An all-reduce can also go round a ring, or directly from each rank to every other. schedules.py chooses, and has the
ring's order.

No rank requests or confirms a chunk: the data that others need is queued immediately, and results follow as they
become ready. So both directions of a link are busy from the first chunk to the last, while this thread adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from potluck.dist import reduction, schedules
from potluck.dist.channel import Channel, chunks, raw
from potluck.dist.compression import Compressor, Exchange, PairExchange
from potluck.dist.peers import Peers
from potluck.dist.queues import Aborted, DeadlinePassed, PeerGone
from potluck.dist.record import Call
from potluck.dist.reduction import Op
from potluck.errors import CollectiveTimeoutError

_EMPTY = memoryview(b"")
_AHEAD = 4
"""Messages that a rank sends before it receives one. If all were sent first, the link would stop when the system's
buffers are full."""


class Collectives(Protocol):
    """The collectives of a group on flat, contiguous tensors in host memory. Lists have one entry for each rank.

    `identity` identifies a tensor from step to step, so that its residual can be added.
    """

    def barrier(self, call: Call) -> None: ...
    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None: ...
    def reduce(self, call: Call, flat: Tensor, op: Op, root: int) -> None: ...
    def broadcast(self, call: Call, flat: Tensor, root: int) -> None: ...
    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> None: ...
    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None: ...
    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> None: ...
    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None: ...
    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None: ...


class NetworkCollectives:
    """Every collective by messages between the ranks, or by a stream between two."""

    def __init__(self, peers: Peers, compressor: Compressor | None = None) -> None:
        self.peers, self.compressor = peers, compressor

    def barrier(self, call: Call) -> None:
        channel = Channel(self.peers, call)
        for rank in channel.others:
            channel.send_part(rank, _EMPTY)
        for rank in channel.others:
            channel.take(rank)

    def monitored_barrier(self, call: Call, wait_all_ranks: bool) -> None:
        """A barrier that, on rank 0, names the first missing rank, or all of them."""
        peers, channel = self.peers, Channel(self.peers, call)
        if peers.rank != 0:
            channel.send_part(0, _EMPTY)
            channel.take(0)
            return
        missing: list[int] = []
        for rank in channel.others:
            try:
                peers.queues.take(peers.group, peers.endpoints[rank], call.seq, call.deadline)
            except (DeadlinePassed, PeerGone):
                missing.append(rank)
                if not wait_all_ranks:
                    break
            except Aborted:
                peers.check()
        if missing:
            named = ", ".join(peers.who(rank) for rank in missing)
            # It begins as gloo's does: scripts look for it.
            text = f"Rank 0 timed out in monitoredBarrier #{call.seq}: {named} did not come in time"
            peers.fail(text)
            raise CollectiveTimeoutError(text, hint="look at what these ranks do")
        for rank in channel.others:
            channel.send_part(rank, _EMPTY)

    # -- reductions -----------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None:
        """In place."""
        peers, world, name = self.peers, self.peers.world, reduction.name_of(op)
        settings = peers.settings
        # Small tensors, which are often metrics, stay exact.
        large = flat.nbytes > settings.small_bytes and world > 1
        if self.compressor is not None and large and self.compressor.suits(name, flat.dtype):
            self._compressed(call, self.compressor, flat, identity, average=name == "AVG")
            return
        channel = Channel(peers, call, stream_bytes=flat.nbytes)
        sent = _prepared(op, flat)
        algorithm = settings.algorithm
        if algorithm == "auto" or not large:
            algorithm = schedules.choose(flat.nbytes, world, settings.small_bytes, settings.chunk_bytes)
            if algorithm == "ring" and reduction.working_dtype(op, flat.dtype) != flat.dtype:
                algorithm = "owners"  # a ring sends sums, which here are twice as wide as the tensor
        if algorithm == "ring" and world > 1:
            _reduce_by_ring(channel, flat, sent, op)
        elif algorithm == "direct":
            _reduce_directly(channel, flat, sent, op, targets=range(world))
        else:
            _reduce_by_owners(channel, flat, sent, op, targets=range(world))

    def _compressed(
        self, call: Call, compressor: Compressor, flat: Tensor, identity: object, *, average: bool
    ) -> None:
        peers = self.peers
        if peers.world == 2:
            pair = compressor.begin_pair(identity, flat, average=average)
            _compressed_pair(Channel(peers, call, stream_bytes=pair.payload_bytes), pair)
        else:
            exchanges = compressor.begin_pieces(identity, flat, peers.rank, peers.world, average=average)
            _compressed_by_owners(Channel(peers, call), exchanges)

    def reduce(self, call: Call, flat: Tensor, op: Op, root: int) -> None:
        """Reduce in place at the root. The other tensors do not change."""
        small = flat.nbytes <= self.peers.settings.small_bytes
        by = _reduce_directly if small else _reduce_by_owners
        by(Channel(self.peers, call), flat, _prepared(op, flat), op, targets=[root])

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None:
        """Send inputs[k] to rank k. output becomes the reduction of this rank's inputs."""
        channel = Channel(self.peers, call)
        sent = [_prepared(op, part) for part in inputs]
        for rank in channel.others:
            channel.send(rank, sent[rank])
        _reduce_own_part(channel, sent[channel.rank], output, op, receivers=())
        channel.settle()

    # -- movements ------------------------------------------------------------------------------------------

    def broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        """Broadcast along a binomial tree, chunk by chunk; each chunk is forwarded as soon as it has arrived."""
        channel, world = Channel(self.peers, call), self.peers.world
        parent, children = _tree((channel.rank - root) % world, world)
        channel.waits_for(() if parent is None else [(parent + root) % world])
        view = raw(flat)
        for start, stop in chunks(flat.nbytes, channel.settings.chunk_bytes):
            if parent is not None:
                ((_, part),) = channel.parts((parent + root) % world, stop - start)
                view[start:stop] = part
            for child in children:
                channel.send_part((child + root) % world, view[start:stop])
        channel.settle()

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> None:
        self.all_to_all(call, outputs, [mine] * self.peers.world)

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None:
        """outputs, at the root only, become every rank's tensor."""
        channel = Channel(self.peers, call)
        if channel.rank != root:
            channel.waits_for(())
            channel.send(root, mine)
        else:
            outputs[root].copy_(mine)
            for rank in channel.others:
                channel.receive_into(rank, outputs[rank])
        channel.settle()

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Send each rank one of the root's inputs."""
        channel = Channel(self.peers, call)
        channel.waits_for(() if channel.rank == root else [root])
        if channel.rank == root:
            for rank in channel.others:
                channel.send(rank, inputs[rank])
            output.copy_(inputs[root])
        else:
            channel.receive_into(root, output)
        channel.settle()

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """inputs[k] goes to rank k, outputs[k] comes from it; sizes may differ from pair to pair."""
        channel = Channel(self.peers, call)
        for rank in channel.others:
            channel.send(rank, inputs[rank])
        outputs[channel.rank].copy_(inputs[channel.rank])
        for rank in channel.others:
            channel.receive_into(rank, outputs[rank])
        channel.settle()


# -- how a reduction goes


def _prepared(op: Op, flat: Tensor) -> Tensor:
    """This rank's values: the tensor itself, or a multiplied copy of the working dtype."""
    if reduction.name_of(op) != "PREMUL_SUM":
        return flat
    values = flat.to(reduction.working_dtype(op, flat.dtype), copy=True)
    reduction.premul(op, values)
    return values


def _reduce_directly(channel: Channel, flat: Tensor, sent: Tensor, op: Op, targets: Sequence[int]) -> None:
    """Every rank sends its whole tensor to the targets, which add in the order of the ranks."""
    for rank in channel.others:
        if rank in targets:
            channel.send(rank, sent)
    if channel.rank not in targets:
        channel.waits_for(())
        return channel.settle()
    # Not in place: what the others have not received yet is read from there.
    total = torch.empty(flat.numel(), dtype=reduction.working_dtype(op, flat.dtype))
    for begin, end in chunks(sent.nbytes, channel.settings.chunk_bytes):
        first, last = begin // sent.itemsize, end // sent.itemsize
        for rank in range(channel.world):
            own = rank == channel.rank
            part = sent[first:last] if own else channel.receive_chunk(rank, last - first, sent.dtype)
            if rank == 0:
                total[first:last].copy_(part)
            else:
                reduction.accumulate(op, total[first:last], part)
    reduction.finish(op, total, channel.world)
    channel.settle()
    flat.copy_(total)


def _reduce_by_owners(channel: Channel, flat: Tensor, sent: Tensor, op: Op, targets: Sequence[int]) -> None:
    spans = schedules.split(flat.numel(), channel.world)
    for rank in channel.others:
        start, stop = spans[rank]
        channel.send(rank, sent[start:stop])
    start, stop = spans[channel.rank]
    wanted = channel.rank in targets
    result = flat[start:stop] if wanted else torch.empty_like(flat[start:stop])
    receivers = [rank for rank in channel.others if rank in targets]
    _reduce_own_part(channel, sent[start:stop], result, op, receivers)
    if wanted:
        for rank in channel.others:
            # What is there was sent to its owner, who needed it for what arrives now: it may be overwritten.
            channel.receive_into(rank, flat[spans[rank][0] : spans[rank][1]])
    channel.settle()


def _reduce_own_part(channel: Channel, mine: Tensor, result: Tensor, op: Op, receivers: Sequence[int]) -> None:
    """Reduce the part of the tensor that this rank owns, chunk by chunk, and send each to the receivers.

    `result` may be `mine`, because this rank's own part is not sent before it is reduced.
    """
    others = sorted(channel.others)
    working = reduction.working_dtype(op, result.dtype)
    in_place = working == result.dtype
    for begin, end in chunks(mine.nbytes, channel.chunk_bytes):
        first, last = begin // mine.itemsize, end // mine.itemsize
        part, target = mine[first:last], result[first:last]
        if not in_place:
            total = part.to(working, copy=True)
        else:
            total = target
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)
        for rank in others:
            reduction.accumulate(op, total, channel.receive_chunk(rank, last - first, mine.dtype))
        reduction.finish(op, total, channel.world)
        if not in_place:
            target.copy_(total)
        for receiver in receivers:
            channel.send_part(receiver, raw(target))


def _reduce_by_ring(channel: Channel, flat: Tensor, sent: Tensor, op: Op) -> None:
    """Send chunks round the ring from neighbour to neighbour: once to reduce them, once to distribute them.

    Partial sums have the working dtype. One rank finishes each chunk, so that all ranks get the same bits.
    """
    me, world = channel.rank, channel.world
    left, right = (me - 1) % world, (me + 1) % world
    channel.waits_for([left])
    working = reduction.working_dtype(op, flat.dtype)
    partial = sent if sent.dtype == working else sent.to(working, copy=True)
    pieces = schedules.pieces_for(-(-flat.numel() // world) * working.itemsize, channel.settings.chunk_bytes)
    spans = schedules.cut(schedules.split(flat.numel(), world), pieces)
    steps = schedules.ring_all_reduce(me, world, pieces)

    def send(step: schedules.RingStep) -> None:
        first, last = spans[step.send]
        channel.send_part(right, raw((partial if step.combine else flat)[first:last]))

    for step in steps[:pieces]:
        send(step)
    for at, step in enumerate(steps):
        first, last = spans[step.receive]
        if not step.combine:
            channel.receive_into(left, flat[first:last])
        else:
            total = partial[first:last]
            reduction.accumulate(op, total, channel.receive_chunk(left, last - first, working))
            if step.receive // pieces == me:
                reduction.finish(op, total, world)
                if partial is not flat:
                    flat[first:last].copy_(total)
        if at + pieces < len(steps):
            send(steps[at + pieces])
    channel.settle()


def _compressed_by_owners(channel: Channel, exchanges: Sequence[Exchange]) -> None:
    """Exchange one piece of every part after the other, so that pieces are sent while others are packed and
    unpacked."""
    me = channel.rank
    for exchange in exchanges:
        for rank in channel.others:
            channel.send(rank, exchange.outgoing(rank))
    for exchange in exchanges:
        for rank in range(channel.world):
            payload = None if rank == me else channel.receive(rank, exchange.payload_bytes(me), torch.uint8)
            exchange.add(rank, payload)
        result = exchange.result()
        for rank in channel.others:
            channel.send(rank, result)
        exchange.place(me, result)
    for exchange in exchanges:
        for rank in channel.others:
            exchange.place(rank, channel.receive(rank, exchange.payload_bytes(rank), torch.uint8))
    channel.settle()


def _compressed_pair(channel: Channel, exchange: PairExchange) -> None:
    """Each of two ranks sends its whole packed tensor. Pieces are sent while others are packed and added."""
    other = 1 - channel.rank
    placed = 0
    for number in range(len(exchange) + _AHEAD):
        if number < len(exchange):
            channel.send_part(other, raw(exchange.outgoing(number)))
        if number >= _AHEAD and placed < len(exchange):
            exchange.place(placed, channel.receive_chunk(other, exchange.message_bytes(placed), torch.uint8))
            placed += 1
    channel.settle()


def _tree(place: int, world: int) -> tuple[int | None, list[int]]:
    """Parent and children of a place in the binomial tree whose root is place 0."""
    parent = place & (place - 1) if place else None
    bit = place & -place if place else 1 << (world - 1).bit_length()
    children = []
    while bit > 1:
        bit >>= 1
        if place + bit < world:
            children.append(place + bit)
    return parent, children
