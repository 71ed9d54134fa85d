"""Collectives of ranks on several machines, some of which have more than one: owns doing as much as can be at home.

It must not know how bytes travel: it has a path within the machine and one between the machines' first ranks.

What is reduced or handed to everybody crosses the network once for each machine, not for each rank. Everything else
goes straight from rank to rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.lane import Call
from potluck.dist.paths import LocalPath, MeshPath
from potluck.dist.profiled import RUNNING
from potluck.dist.reduction import Op

SUM = dist.ReduceOp.SUM


class HierarchicalPath(MeshPath):
    """`home` is the shared memory of this machine (None: this rank is alone there), `between` the way between the
    first ranks of the machines (None: this rank is not the first of its own)."""

    def __init__(
        self, whole: MeshPath, home: LocalPath | None, between: MeshPath | None, machines: list[list[int]]
    ) -> None:
        super().__init__(whole.lane, whole.compressor)
        self._home, self._between, self._machines = home, between, machines
        self._mine = next(at for at, ranks in enumerate(machines) if self.lane.rank in ranks)

    def _meet_twice(self) -> None:
        """For the profiler: first the ranks of this machine, then the other machines."""
        if RUNNING.ranges is not None and self._home is not None and self._between is not None:
            RUNNING.ranges.meetings = 2

    def barrier(self, call: Call) -> None:
        self._meet_twice()
        if self._home is not None:
            self._home.barrier(call)
        if self._between is not None:
            self._between.barrier(call)
        if self._home is not None:
            self._home.barrier(call)

    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None:
        self._meet_twice()
        values, inner = flat, op
        name = reduction.name_of(op)
        if name in ("AVG", "PREMUL_SUM"):
            # Divided by all ranks at the end, and multiplied once: in between it is a sum.
            values, inner = flat.to(reduction.working_dtype(op, flat.dtype), copy=True), SUM
            reduction.premul(op, values)
        if self._home is not None:
            self._home.reduce(call, values, inner, 0)
        if self._between is not None:
            self._between.all_reduce(call, values, inner, identity)
        if self._home is not None:
            self._home.broadcast(call, values, 0)
        if values is not flat:
            reduction.finish(op, values, self.lane.world)
            flat.copy_(values)

    def broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        origin = next(at for at, ranks in enumerate(self._machines) if root in ranks)
        if self._home is not None and origin == self._mine:
            self._home.broadcast(call, flat, self._machines[origin].index(root))
        if self._between is not None:
            self._between.broadcast(call, flat, origin)
        if self._home is not None and origin != self._mine:
            self._home.broadcast(call, flat, 0)
