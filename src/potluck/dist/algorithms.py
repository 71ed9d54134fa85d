"""Collectives over the mail between machines: owns who sends what to whom, with flat tensors in host memory.

It must not know torch's process groups, devices or threads.

Reductions of some size go by owners: each rank owns a part of the tensor, gets that part from all others, adds it
to its own in the working dtype in the order of the ranks, and sends the result on, chunk by chunk. That is a ring's
traffic, 2(N-1)/N of the tensor for each rank, in two hops instead of 2(N-1), and all ranks get the same bits.

An all-reduce can go round a ring as well, or from everybody straight to everybody; schedules.py says who sends what
then, and what is taken where nothing else was asked for.

Nobody asks for a chunk or confirms one: what the others need is queued at once, and results behind it as they come.
So both directions of a link are busy from the first chunk to the last, while this thread adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.dist import reduction, schedules
from potluck.dist.compression import Exchange, PairExchange
from potluck.dist.lane import Trip, chunks, raw
from potluck.dist.reduction import Op


def _others(trip: Trip) -> list[int]:
    """The other ranks, beginning with the next: so that not all send to rank 0 first."""
    rank, world = trip.lane.rank, trip.lane.world
    return [(rank + step) % world for step in range(1, world)]


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _prepared(op: Op, flat: Tensor) -> Tensor:
    """What this rank contributes: the tensor itself, or a multiplied copy of the working dtype."""
    if reduction.name_of(op) != "PREMUL_SUM":
        return flat
    values = flat.to(reduction.working_dtype(op, flat.dtype), copy=True)
    reduction.premul(op, values)
    return values


def barrier(trip: Trip) -> None:
    empty = memoryview(b"")
    for rank in _others(trip):
        trip.send_part(rank, empty)
    for rank in _others(trip):
        trip.take(rank)


def all_reduce(trip: Trip, flat: Tensor, op: Op) -> None:
    """In place."""
    terms, world = trip.lane.terms, trip.lane.world
    sent = _prepared(op, flat)
    algorithm = terms.algorithm
    if algorithm == "auto" or flat.nbytes <= terms.small_bytes:
        limits = schedules.Thresholds(small_bytes=terms.small_bytes, chunk_bytes=terms.chunk_bytes)
        algorithm = schedules.choose(flat.nbytes, world, limits)
        if algorithm == "ring" and reduction.working_dtype(op, flat.dtype) != flat.dtype:
            algorithm = "owners"  # round the ring go sums, which are twice as wide here as what is added up
    if algorithm == "ring" and world > 1:
        _reduce_by_ring(trip, flat, sent, op)
    elif algorithm == "direct":
        _reduce_directly(trip, flat, sent, op, targets=range(world))
    else:
        _reduce_by_owners(trip, flat, sent, op, targets=range(world))


def compressed_all_reduce(trip: Trip, exchanges: Sequence[Exchange]) -> None:
    """By owners too, with what is sent packed by a codec: one piece of every part after the other, so that pieces
    travel while others are packed and unpacked."""
    me, world = trip.lane.rank, trip.lane.world
    for exchange in exchanges:
        for rank in _others(trip):
            trip.send(rank, exchange.outgoing(rank))
    for exchange in exchanges:
        for rank in range(world):
            payload = None if rank == me else trip.receive(rank, exchange.payload_bytes(me), torch.uint8)
            exchange.add(rank, payload)
        result = exchange.result()
        for rank in _others(trip):
            trip.send(rank, result)
        exchange.place(me, result)
    for exchange in exchanges:
        for rank in _others(trip):
            exchange.place(rank, trip.receive(rank, exchange.payload_bytes(rank), torch.uint8))
    trip.settle()


_AHEAD = 4
"""Messages that a rank sends before it takes one. What was taken makes room for more: with all sent first, the link
stands still when the system's buffers are full."""


def compressed_pair(trip: Trip, exchange: PairExchange) -> None:
    """All-reduce between two ranks: each sends all of its packed tensor. Pieces travel while others are packed and
    while those of the other rank are added."""
    other = 1 - trip.lane.rank
    placed = 0
    for number in range(len(exchange) + _AHEAD):
        if number < len(exchange):
            trip.send_part(other, raw(exchange.outgoing(number)))
        if number >= _AHEAD and placed < len(exchange):
            message = _as_tensor(trip, other, exchange.message_bytes(placed), torch.uint8)
            exchange.place(placed, message)
            placed += 1
    trip.settle()


def reduce(trip: Trip, flat: Tensor, op: Op, root: int) -> None:
    """In place at the root; the others' tensors stay as they are."""
    sent = _prepared(op, flat)
    if flat.nbytes <= trip.lane.terms.small_bytes:
        _reduce_directly(trip, flat, sent, op, targets=[root])
    else:
        _reduce_by_owners(trip, flat, sent, op, targets=[root])


def _reduce_directly(trip: Trip, flat: Tensor, sent: Tensor, op: Op, targets: Sequence[int]) -> None:
    """Everybody sends all to the targets, and those add in the order of the ranks."""
    me, world = trip.lane.rank, trip.lane.world
    for rank in _others(trip):
        if rank in targets:
            trip.send(rank, sent)
    if me not in targets:
        trip.waits_for(())
        return trip.settle()
    # Not in place: what the others have not got yet is read from there.
    total = torch.empty(flat.numel(), dtype=reduction.working_dtype(op, flat.dtype))
    for begin, end in chunks(sent.nbytes, trip.lane.terms.chunk_bytes):
        first, last = begin // sent.itemsize, end // sent.itemsize
        for rank in range(world):
            part = sent[first:last] if rank == me else _as_tensor(trip, rank, last - first, sent.dtype)
            if rank == 0:
                total[first:last].copy_(part)
            else:
                reduction.accumulate(op, total[first:last], part)
    reduction.finish(op, total, world)
    trip.settle()
    flat.copy_(total)


def _reduce_by_owners(trip: Trip, flat: Tensor, sent: Tensor, op: Op, targets: Sequence[int]) -> None:
    me, world = trip.lane.rank, trip.lane.world
    spans = _spans(flat.numel(), world)
    for rank in _others(trip):
        start, stop = spans[rank]
        trip.send(rank, sent[start:stop])
    start, stop = spans[me]
    wanted = me in targets
    result = flat[start:stop] if wanted else torch.empty_like(flat[start:stop])
    receivers = [rank for rank in _others(trip) if rank in targets]
    _own_part(trip, sent[start:stop], result, op, receivers)
    if wanted:
        for rank in _others(trip):
            # What lies there was sent to its owner, who needed it for what comes now: it may be overwritten.
            trip.receive_into(rank, flat[spans[rank][0] : spans[rank][1]])
    trip.settle()


def _reduce_by_ring(trip: Trip, flat: Tensor, sent: Tensor, op: Op) -> None:
    """Chunks go round from neighbour to neighbour: once to be added up, once more to be handed out.

    Sums on their way are of the working dtype; each chunk is finished by one rank, so that all get the same bits.
    """
    me, world = trip.lane.rank, trip.lane.world
    trip.waits_for([(me - 1) % world])
    working = reduction.working_dtype(op, flat.dtype)
    partial = sent if sent.dtype == working else sent.to(working, copy=True)
    blocks = schedules.split(flat.numel(), world)
    pieces = schedules.pieces_for(-(-flat.numel() // world) * working.itemsize, trip.lane.terms.chunk_bytes)
    spans = schedules.cut(blocks, pieces)
    plan = schedules.ring_all_reduce(me, world, pieces)

    def start(at: int) -> None:
        if at >= len(plan.rounds):
            return
        source = partial if plan.rounds[at].combine else flat
        for move in plan.rounds[at].sends:
            first, last = spans[move.chunk]
            trip.send_part(move.peer, raw(source[first:last]))

    for at in range(plan.ahead):
        start(at)
    for at, step in enumerate(plan.rounds):
        for move in step.receives:
            first, last = spans[move.chunk]
            if not step.combine:
                trip.receive_into(move.peer, flat[first:last])
                continue
            total = partial[first:last]
            reduction.accumulate(op, total, _as_tensor(trip, move.peer, last - first, working))
            if move.chunk // pieces == me:
                reduction.finish(op, total, world)
                if partial is not flat:
                    flat[first:last].copy_(total)
        start(at + plan.ahead)
    trip.settle()


def _own_part(trip: Trip, mine: Tensor, result: Tensor, op: Op, receivers: Sequence[int]) -> None:
    """Add up the part of the tensor that this rank owns, chunk by chunk, and send each on to the receivers.

    `result` may be `mine`: nobody else is sent this rank's own part before it is added up.
    """
    world = trip.lane.world
    others = sorted(_others(trip))
    working = reduction.working_dtype(op, result.dtype)
    in_place = working == result.dtype
    for begin, end in chunks(mine.nbytes, trip.chunk_bytes):
        first, last = begin // mine.itemsize, end // mine.itemsize
        part, target = mine[first:last], result[first:last]
        if not in_place:
            total = part.to(working, copy=True)
        else:
            total = target
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)
        for rank in others:
            reduction.accumulate(op, total, _as_tensor(trip, rank, last - first, mine.dtype))
        reduction.finish(op, total, world)
        if not in_place:
            target.copy_(total)
        for receiver in receivers:
            trip.send_part(receiver, raw(target))


def _as_tensor(trip: Trip, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """The next chunk from a rank, where it lies."""
    ((_, view),) = trip.parts(rank, count * dtype.itemsize)
    return torch.frombuffer(view, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def reduce_scatter(trip: Trip, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None:
    """inputs[k], of this rank, goes to rank k; output gets the reduction of what is meant for this rank."""
    sent = [_prepared(op, part) for part in inputs]
    for rank in _others(trip):
        trip.send(rank, sent[rank])
    _own_part(trip, sent[trip.lane.rank], output, op, receivers=())
    trip.settle()


def all_gather(trip: Trip, outputs: Sequence[Tensor], mine: Tensor) -> None:
    for rank in _others(trip):
        trip.send(rank, mine)
    outputs[trip.lane.rank].copy_(mine)
    for rank in _others(trip):
        trip.receive_into(rank, outputs[rank])
    trip.settle()


def broadcast(trip: Trip, flat: Tensor, root: int) -> None:
    """Down a binomial tree, chunk by chunk: each is passed on as soon as it is there."""
    world = trip.lane.world
    place = (trip.lane.rank - root) % world
    parent, children = _tree(place, world)
    trip.waits_for(() if parent is None else [(parent + root) % world])
    view = raw(flat)
    for start, stop in chunks(flat.nbytes, trip.lane.terms.chunk_bytes):
        if parent is not None:
            ((_, part),) = trip.parts((parent + root) % world, stop - start)
            view[start:stop] = part
        for child in children:
            trip.send_part((child + root) % world, view[start:stop])
    trip.settle()


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


def gather(trip: Trip, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None:
    """outputs, at the root alone, gets every rank's tensor."""
    if trip.lane.rank != root:
        trip.waits_for(())
        trip.send(root, mine)
    else:
        outputs[root].copy_(mine)
        for rank in _others(trip):
            trip.receive_into(rank, outputs[rank])
    trip.settle()


def scatter(trip: Trip, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """inputs, at the root alone: what each rank gets."""
    trip.waits_for(() if trip.lane.rank == root else [root])
    if trip.lane.rank == root:
        for rank in _others(trip):
            trip.send(rank, inputs[rank])
        output.copy_(inputs[root])
    else:
        trip.receive_into(root, output)
    trip.settle()


def all_to_all(trip: Trip, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """inputs[k] goes to rank k, outputs[k] comes from it; sizes may differ from pair to pair."""
    for rank in _others(trip):
        trip.send(rank, inputs[rank])
    outputs[trip.lane.rank].copy_(inputs[trip.lane.rank])
    for rank in _others(trip):
        trip.receive_into(rank, outputs[rank])
    trip.settle()
