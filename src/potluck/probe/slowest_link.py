"""Measures the slowest link between ranks, to compare a collective with it."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from potluck.dist.shm import neighbourhood
from potluck.probe import tcp

MEMORY, TCP = "memory", "tcp"


class SlowestLink(NamedTuple):
    """The slowest kind of link between ranks."""

    bytes_per_s: float | None
    kind: str
    """memory, tcp, or empty for one rank."""
    machines: int
    """Number of machines that the ranks are on."""

    def bytes_per_s_of(self, backend: str) -> float | None:
        """The rate that bounds a collective of this backend; None for NCCL within a machine.

        NCCL then sends from GPU to GPU, which is not measured here.
        """
        return None if backend.lower() == "nccl" and self.kind == MEMORY else self.bytes_per_s


def slowest(store: Any, *, seconds: float = 1.0) -> SlowestLink:
    """Measure the slowest kind of link between the ranks of the default group; the same on all ranks.

    Within a machine this is how fast processes copy memory, all at the same time. Between machines it is a bare TCP
    connection from the first rank to the first one on another machine.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        return SlowestLink(None, "", 1)
    store.set(f"bench/where/{rank}", neighbourhood())
    where = [store.get(f"bench/where/{other}").decode() for other in range(world)]
    away = next((other for other, place in enumerate(where) if place != where[0]), None)
    if away is None:
        store.set(f"bench/ready/{rank}", "yes")
        for other in range(world):
            store.get(f"bench/ready/{other}")
        store.set(f"bench/memory/{rank}", repr(memory_bytes_per_s()))
        rate = min(float(store.get(f"bench/memory/{other}")) for other in range(world))
        return SlowestLink(rate, MEMORY, 1)
    if rank in (0, away):
        towards = os.environ.get("MASTER_ADDR", "127.0.0.1")
        rate = tcp.bytes_per_s(store, "bench/tcp", rank == 0, towards=towards, seconds=seconds)
        if rank == 0:
            store.set("bench/tcp/agreed", repr(rate))
    return SlowestLink(float(store.get("bench/tcp/agreed")), TCP, len(set(where)))


def memory_bytes_per_s(nbytes: int = 32 << 20, repeats: int = 5) -> float:
    """How fast this process copies memory, which limits a link between processes of one machine."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return nbytes / best
