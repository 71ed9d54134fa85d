"""What ranks do in the tests of the profiler: collectives with a straggler, on any backend, and the events seen.

It knows of Potluck only the name of its backend and its settings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

LATE_S = 0.3
Seen = list[tuple[str, float, list[Any]]]
"""(name, seconds, shapes) of each event of a backend, in the order of their beginnings."""


def _seen(found: profile, prefix: str) -> Seen:
    events = sorted(found.events() or (), key=lambda event: event.time_range.start)
    return [(e.name, e.cpu_time_total / 1e6, e.input_shapes) for e in events if e.name.startswith(prefix)]


def _watched(prefix: str, body: Callable[[], object]) -> Seen:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        body()
    return _seen(found, prefix)


def _group(backend: str, **options: Any) -> None:
    from potluck.dist import Config

    config = Config(**options) if backend == "potluck" else None
    dist.init_process_group(backend, pg_options=config, timeout=timedelta(seconds=30))


def straggler(rank: int, world: int, backend: str, later: bool, way: str) -> Seen:
    """One all-reduce, to which rank 1 comes late. "both": shared memory between rank 0 and 2, TCP to rank 1."""
    from potluck.dist import shm

    own = shm.neighbourhood
    if way == "both":
        shm.neighbourhood = lambda: f"machine {rank % 2}"
    _group(backend, transport="auto" if way == "both" else way)
    try:
        values = torch.ones(30, 1000)
        dist.all_reduce(values)

        def body() -> None:
            dist.barrier()  # one profiler takes longer to start than another
            if rank == 1:
                time.sleep(LATE_S)
            work = dist.all_reduce(values, async_op=later)
            if later:
                assert work is not None
                work.wait()

        seen = _watched(f"{backend}:all_reduce", body)
        dist.barrier()
        return seen
    finally:
        shm.neighbourhood = own
        dist.destroy_process_group()


def everything(rank: int, world: int, transport: str) -> dict[str, Seen]:
    """Each collective once, a message, DDP's buckets, and what nobody saw."""
    _group("potluck", transport=transport)
    try:
        mine, many = torch.ones(7), [torch.zeros(7) for _ in range(world)]
        wide = torch.ones(7 * world)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(mine),
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([mine, torch.ones(3)]),
            "all_reduce_sparse": lambda: dist.all_reduce(torch.eye(4).to_sparse()),
            "reduce": lambda: dist.reduce(mine, 0),
            "reduce_scatter": lambda: dist.reduce_scatter(mine, many),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(mine, wide),
            "all_gather": lambda: dist.all_gather(many, mine),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, mine),
            "gather": lambda: dist.gather(mine, many if rank == 0 else None),
            "scatter": lambda: dist.scatter(mine, many if rank == 0 else None),
            "broadcast": lambda: dist.broadcast(mine, 0),
            "all_to_all": lambda: dist.all_to_all(many, [torch.ones(7) for _ in range(world)]),
            "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(wide), wide),
            "barrier": lambda: dist.barrier(),
            "send" if rank == 0 else "recv": lambda: dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0),
        }
        seen = {name: _watched("potluck:", call) for name, call in calls.items()}
        seen["unseen"] = _in_another_thread()
        seen["ddp"] = _ddp()
        return seen
    finally:
        dist.destroy_process_group()


def _in_another_thread() -> Seen:
    """The profiler looks at the thread in which it was started: so gloo has it too."""

    def body() -> None:
        other = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
        other.start()
        other.join()

    return _watched("potluck:", body)


def _ddp() -> Seen:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=1e-4)
    for _ in range(2):  # the buckets are made anew after the first
        model(torch.ones(2, 8)).sum().backward()
    return _watched("potluck:all_reduce", lambda: model(torch.ones(2, 8)).sum().backward())


def all_threads(rank: int, world: int) -> list[tuple[str, str]]:
    """(event, the event that it lies in) of three all-reduces, where the profiler looks at every thread."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    _group("potluck")
    try:
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
            works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
            for work in works:
                assert work is not None
                work.wait()
        events = [event for event in found.events() or () if event.name.startswith("potluck:")]
        return [(event.name, event.cpu_parent.name if event.cpu_parent else "") for event in events]
    finally:
        dist.destroy_process_group()


def outlived(rank: int, world: int) -> Seen:
    """The profiler stops while a collective is under way, another starts, and one fails: nothing breaks."""
    _group("potluck")
    try:
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]):
            work = dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
        # Rank 1 comes only now.
        store = dist.distributed_c10d._get_default_store()
        store.set("stopped", "1") if rank == 0 else store.wait(["stopped"])
        work = work or dist.all_reduce(torch.ones(5), async_op=True)
        assert work is not None
        work.wait()

        def failing() -> None:
            with pytest.raises(RuntimeError, match="called different collectives"):
                dist.all_reduce(torch.ones(5 + rank))

        return _watched("potluck:", failing)
    finally:
        dist.destroy_process_group()
