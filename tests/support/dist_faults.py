"""What ranks do in the tests of faults: each returns what it was told, and after how many seconds.

It knows the backend's interface and its errors.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Told = tuple[str, str, float]
"""(name of the error's class, its text, seconds)."""


def begin(transport: str, timeout_s: float = 20.0, **settings: Any) -> None:
    from potluck.dist import Config

    config = Config(transport=transport, **settings)
    dist.init_process_group("potluck", pg_options=config, timeout=timedelta(seconds=timeout_s))


def allow(timeout_s: float) -> None:
    """From here on; not for the making of the group, which takes longer on a busy box."""
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))  # type: ignore[union-attr]


def say(name: str) -> None:
    """This rank is so far: for `heard`, without a collective."""
    store().set(f"{name}-{dist.get_rank()}", "")


def heard(name: str, ranks: Iterable[int]) -> None:
    """Wait until these ranks have said so."""
    store().wait([f"{name}-{rank}" for rank in ranks], timedelta(seconds=30))


def over(world: int) -> None:
    """Rank 0 has the store, and leaves last."""
    say("over")
    if dist.get_rank() == 0:
        heard("over", range(world))


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def told_by(call: Callable[[], object]) -> Told:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def mismatch(rank: int, world: int, transport: str, kind: str) -> list[Told]:
    """All ranks agree once, then the last differs; what every rank is told then, and at its next call."""
    begin(transport)
    try:
        dist.all_reduce(torch.ones(3))
        # A quarrel ends all that is under way, also a rank's part in this one: let everybody be through.
        say("through")
        heard("through", range(world))
        odd = rank == world - 1
        calls: dict[str, Callable[[], object]] = {
            "dtype": lambda: dist.all_reduce(torch.ones(6, dtype=torch.float64 if odd else torch.float32)),
            "shape": lambda: dist.all_reduce(torch.ones(7 if odd else 6)),
            "op": lambda: dist.all_reduce(torch.ones(6), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
            "collective": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(6)),
            "root": lambda: dist.broadcast(torch.ones(6), 1 if odd else 0),
        }
        first = told_by(calls[kind])
        # A rank that only sends is through before anybody can object: it hears of it at a later call.
        second = told_by(lambda: [dist.barrier() for _ in range(3)])
        return [first, second]
    finally:
        dist.destroy_process_group()


def absent(rank: int, world: int, transport: str, timeout_s: float) -> Told:
    """The last rank does not come to the second collective, and lives on."""
    begin(transport)
    try:
        dist.all_reduce(torch.ones(3))
        allow(timeout_s)
        if rank == world - 1:
            heard("told", range(rank))
            over(world)
            return "", "", 0.0
        told = told_by(lambda: dist.all_reduce(torch.ones(4, 5)))
        say("told")
        over(world)
        return told
    finally:
        dist.destroy_process_group()


def in_the_backward_pass(rank: int, world: int, transport: str, device: str) -> Told:
    """The last rank dies between two steps of DDP, whose C++ then waits for it."""
    if device == "fake":
        from support import fake_device

        fake_device.install()
    begin(transport)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    batch = torch.randn(4, 64).to(device)

    def steps() -> None:
        for step in range(5):
            if rank == world - 1 and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)  # what it sent for the step before may be lost with it
            model(batch).sum().backward()

    try:
        return told_by(steps)
    finally:
        dist.destroy_process_group()


def of_no_rank(rank: int, world: int) -> list[Told]:
    """Ranks that are not there; and then a collective as if nothing had been."""
    begin("shm")
    group: Any = dist.group.WORLD
    try:
        ones = torch.ones(2)
        calls = (lambda: group.broadcast([ones], 9), lambda: group.send([ones], 9), lambda: group.recv([ones], 9))
        return [*map(told_by, calls), told_by(lambda: dist.all_reduce(ones))]
    finally:
        dist.destroy_process_group()


def killed(rank: int, world: int, transport: str, how: str) -> Told:
    """The last rank dies, or freezes, while the others wait for it."""
    begin(transport, 60.0, heartbeat_s=0.3, heartbeat_timeout_s=1.5)
    try:
        dist.all_reduce(torch.ones(3))
        if rank == world - 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return told_by(lambda: dist.all_reduce(torch.ones(4, 5)))
    finally:
        dist.destroy_process_group()


def aborted(rank: int, world: int, transport: str) -> Told:
    """Rank 0 aborts from another thread what nobody can finish; the last rank never joined it."""
    begin(transport, 60.0)
    try:
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            threading.Timer(0.5, dist.group.WORLD.abort).start()  # type: ignore[union-attr]
        if rank == world - 1:
            heard("told", range(rank))
        # What the others had sent may be enough for one, before the last rank hears of the abort.
        told = told_by(lambda: [dist.all_reduce(torch.ones(3)) for _ in range(3)])
        say("told")
        over(world)
        return told
    finally:
        dist.destroy_process_group()


def monitored(rank: int, world: int) -> Told:
    begin("auto", 20.0)
    try:
        group: Any = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=10))
        if rank == world - 1:
            heard("told", range(rank))
            over(world)
            return "", "", 0.0
        told = told_by(lambda: group.monitored_barrier(timedelta(seconds=0.8), wait_all_ranks=True))
        say("told")
        over(world)
        return told
    finally:
        dist.destroy_process_group()


def messages(rank: int, world: int) -> list[Told]:
    """A message that does not fit, one of another type, and one that never comes; the group goes on after all."""
    begin("auto")
    allow(1.5)
    try:
        if rank == 0:
            dist.send(torch.ones(5), 1)
            dist.send(torch.ones(3), 1)
            told = []
        else:
            told = [told_by(lambda: dist.recv(torch.empty(3), 0))]
            told.append(told_by(lambda: dist.recv(torch.empty(3, dtype=torch.int32), 0)))
            told.append(told_by(lambda: dist.recv(torch.empty(3), 0, tag=9)))
        allow(20.0)
        dist.barrier()
        return told
    finally:
        dist.destroy_process_group()


def disagreeing(rank: int, world: int) -> Told:
    return told_by(lambda: begin("auto", 10.0, chunk_bytes=8192 if rank else 65536))


def bounded_wait(rank: int, world: int) -> Told:
    """work.wait() with a time of its own, shorter than the collective's."""
    begin("tcp", 20.0)
    try:
        if rank == 1:
            heard("told", [0])
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        told = told_by(lambda: work.wait(timedelta(seconds=0.3)))
        say("told")
        work.wait()
        over(world)
        return told
    finally:
        dist.destroy_process_group()


def stranger(rank: int, world: int, transport: str) -> int:
    """Somebody who knows rank 0's address, and even its public key, but is not of the group."""
    import zmq

    begin(transport)
    try:
        formation = dist.group.WORLD._formation  # type: ignore[union-attr]
        dist.barrier()
        if rank == 0:
            return 0
        target = formation.peers.endpoints[0]
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = target.key.encode()
            socket.connect(target.url)
            monitor = socket.get_monitor_socket()
            seen = 0
            end = time.monotonic() + 3
            while time.monotonic() < end and not seen & int(zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                if monitor.poll(200):
                    seen |= int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            socket.disable_monitor()
        return seen & int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    finally:
        dist.barrier()
        dist.destroy_process_group()
