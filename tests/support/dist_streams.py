"""What two ranks do in the tests of large tensors, which go by a stream.

It knows the backend's interface, and where a group keeps its stream.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from potluck.dist import formation
from support.dist_faults import Told, allow, begin, heard, over, say, told_by

LARGE = (1 << 20) + 77
"""Elements: above the size from which a stream is used, and no multiple of anything."""


def streaming() -> bool:
    return dist.group.WORLD._formation.peers.stream is not None  # type: ignore[union-attr]


def _mine(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(LARGE).remainder(97).add(rank).to(dtype)


def sums(rank: int, world: int, settings: dict[str, Any]) -> bool:
    """Large and small all-reduces in turn, each checked; whether the connection was used."""
    begin("tcp", **settings)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                found = _mine(rank, dtype)
                dist.all_reduce(found, op)
                one, two = _mine(0, dtype), _mine(1, dtype)
                wanted = one + two if op == dist.ReduceOp.SUM else torch.maximum(one, two)
                assert torch.equal(found, wanted), (dtype, op)
                small = torch.ones(3)
                dist.all_reduce(small)
                assert small.tolist() == [2.0] * 3
        later = [_mine(rank, torch.float32) for _ in range(2)]
        for work in [dist.all_reduce(part, async_op=True) for part in later]:
            work.wait()
        wanted = _mine(0, torch.float32) + _mine(1, torch.float32)
        assert all(torch.equal(found, wanted) for found in later)
        return streaming()
    finally:
        dist.destroy_process_group()


def packed(rank: int, world: int, encryption: bool) -> list[int]:
    """Sums through int8, both ranks' bits as a checksum of each step."""
    begin("tcp", encryption=encryption, compression="int8")
    try:
        torch.manual_seed(0)
        both = torch.randn(2, 5 * LARGE)
        sums = []
        for _ in range(2):
            found = both[rank].clone()
            dist.all_reduce(found)
            error = float((found - both.sum(0)).norm() / both.sum(0).norm())
            assert error < 0.02, error
            sums.append(int(found.view(torch.int32).to(torch.int64).sum()))
        assert streaming()
        return sums
    finally:
        dist.destroy_process_group()


def behind_a_firewall(rank: int, world: int) -> tuple[bool, int]:
    """Two groups where no connection can be made: whether one was used, and how often it was tried."""
    from potluck.dist import channel

    kept, tried = channel.connect, 0

    def refused(*_: Any) -> None:
        nonlocal tried
        tried += 1

    channel.connect = refused  # type: ignore[assignment]
    begin("tcp")
    try:
        for group in (dist.group.WORLD, dist.new_group([0, 1])):
            found = _mine(rank, torch.float32)
            dist.all_reduce(found, group=group)
            assert torch.equal(found, _mine(0, torch.float32) + _mine(1, torch.float32))
        return streaming(), tried
    finally:
        channel.connect = kept
        dist.destroy_process_group()


def behind_a_silent_firewall(rank: int, world: int, timeout_s: float) -> bool:
    """Packets to the listener vanish, and the collective has less time than an attempt to connect may take."""
    kept = socket.create_connection

    def vanishes(address: tuple[str, int], timeout: float) -> socket.socket:
        time.sleep(timeout)
        raise TimeoutError

    begin("tcp")
    try:
        allow(timeout_s)
        socket.create_connection = vanishes  # type: ignore[assignment]
        found = torch.ones(LARGE)
        dist.all_reduce(found)
        assert found.unique().tolist() == [2.0]
        return streaming()
    finally:
        socket.create_connection = kept
        dist.destroy_process_group()


def renewed(rank: int, world: int) -> int:
    """With keys that wear out soon: how many connections there were."""
    from potluck.dist import channel

    kept, real, made = channel.RENEWED_BYTES, channel.Channel._new_stream, 0

    def counted(own: channel.Channel, other: int) -> Any:
        nonlocal made
        made += 1
        return real(own, other)

    channel.RENEWED_BYTES = 10 << 20  # type: ignore[misc]
    channel.Channel._new_stream = counted  # type: ignore[method-assign]
    begin("tcp")
    try:
        for _ in range(6):
            found = torch.ones(LARGE)
            dist.all_reduce(found)
            assert found.unique().tolist() == [2.0]
        assert streaming()
        return made
    finally:
        channel.RENEWED_BYTES, channel.Channel._new_stream = kept, real  # type: ignore[misc, method-assign]
        dist.destroy_process_group()


def killed(rank: int, world: int, encryption: bool) -> Told:
    """The last rank ends in the midst of a large one."""
    begin("tcp", encryption=encryption)
    tensor = torch.ones(4 * LARGE)
    dist.all_reduce(tensor)
    if rank == world - 1:
        from potluck.dist import streams

        streams.Stream.pull = lambda *_: os._exit(1)  # type: ignore[method-assign, assignment]
    try:
        return told_by(lambda: dist.all_reduce(tensor))
    finally:
        dist.destroy_process_group()


def stuck(rank: int, world: int, timeout_s: float) -> Told:
    """The last rank stops in the midst of a large one, and lives on."""
    begin("tcp")
    tensor = torch.ones(4 * LARGE)
    dist.all_reduce(tensor)
    allow(timeout_s)
    if rank == world - 1:
        from potluck.dist import streams

        kept = streams.Stream.pull
        streams.Stream.pull = lambda *_: heard("told", range(rank))  # type: ignore[method-assign, assignment]
    try:
        told = told_by(lambda: dist.all_reduce(tensor))
        say("told")
        over(world)
        return told
    finally:
        if rank == world - 1:
            streams.Stream.pull = kept  # type: ignore[method-assign]
        dist.destroy_process_group()


def mismatch(rank: int, world: int) -> Told:
    begin("tcp")
    try:
        dist.all_reduce(torch.ones(LARGE))
        say("through")
        heard("through", range(world))
        return told_by(lambda: dist.all_reduce(torch.ones(LARGE + rank)))
    finally:
        dist.destroy_process_group()


def among_strangers(rank: int, world: int, silent: int, encryption: bool) -> bool:
    """Others connect to the listener and say nothing: whether the ranks have their stream all the same."""
    from potluck.dist import streams

    real = streams.StreamListener.open
    held: list[socket.socket] = []

    def crowded(address: str, secret: bytes, port: int) -> streams.StreamListener | None:
        listener = real(address, secret, port)
        assert listener is not None
        held.extend(socket.create_connection(listener._listener.getsockname()) for _ in range(silent))
        return listener

    streams.StreamListener.open = crowded  # type: ignore[method-assign,assignment]
    try:
        return sums(rank, world, {"encryption": encryption})
    finally:
        streams.StreamListener.open = real  # type: ignore[method-assign]
        for connection in held:
            connection.close()


def forked(rank: int, world: int, transport: str) -> bool:
    """A forked child of rank 0 ends in order; the group goes on."""
    begin(transport, encryption=False)
    try:
        if rank == 0:
            child = os.fork()
            if child == 0:
                formation._close_all()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
        found = torch.ones(3)
        dist.all_reduce(found)
        return found.tolist() == [2.0] * 3
    finally:
        dist.destroy_process_group()
