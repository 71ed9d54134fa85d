"""Collectives of ranks on several machines, some with more than one rank: does as much as possible within each
machine.

What is reduced or broadcast crosses the network once for each machine, not for each rank. Everything else goes
directly from rank to rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.local_collectives import LocalGroup
from potluck.dist.network_collectives import NetworkCollectives
from potluck.dist.profiled import RUNNING
from potluck.dist.record import Call
from potluck.dist.reduction import Op

SUM = dist.ReduceOp.SUM


class HierarchicalCollectives(NetworkCollectives):
    """`local` is the group of this machine's ranks (None: this rank is alone there), `between` connects the first
    ranks of the machines (None: this rank is not the first of its own)."""

    def __init__(
        self,
        whole: NetworkCollectives,
        local: LocalGroup | None,
        between: NetworkCollectives | None,
        machines: list[list[int]],
    ) -> None:
        super().__init__(whole.peers, whole.compressor)
        self._local, self._between, self._machines = local, between, machines
        self._mine = next(at for at, ranks in enumerate(machines) if self.peers.rank in ranks)

    def _meet_twice(self) -> None:
        """For the profiler: the ranks of this machine first, then the other machines."""
        if RUNNING.ranges is not None and self._local is not None and self._between is not None:
            RUNNING.ranges.meetings = 2

    def barrier(self, call: Call) -> None:
        self._meet_twice()
        for level in (self._local, self._between, self._local):
            if level is not None:
                level.barrier(call)

    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None:
        self._meet_twice()
        values, inner = flat, op
        if reduction.name_of(op) in ("AVG", "PREMUL_SUM"):
            # Multiplied once, and divided by all ranks at the end: in between it is a sum.
            values, inner = flat.to(reduction.working_dtype(op, flat.dtype), copy=True), SUM
            reduction.premul(op, values)
        if self._local is not None:
            self._local.reduce(call, values, inner, 0)
        if self._between is not None:
            self._between.all_reduce(call, values, inner, identity)
        if self._local is not None:
            self._local.broadcast(call, values, 0)
        if values is not flat:
            reduction.finish(op, values, self.peers.world)
            flat.copy_(values)

    def broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        origin = next(at for at, ranks in enumerate(self._machines) if root in ranks)
        if self._local is not None and origin == self._mine:
            self._local.broadcast(call, flat, self._machines[origin].index(root))
        if self._between is not None:
            self._between.broadcast(call, flat, origin)
        if self._local is not None and origin != self._mine:
            self._local.broadcast(call, flat, 0)
