"""Measures collectives on the present torch.distributed group, and checks every result.

Backends are measured in turn, repetition by repetition, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.device.base import Device
from potluck.device.cpu import CpuDevice
from potluck.errors import UserError
from potluck.spec.collective_rows import CollectiveRow

_WARM_UP = 2
_MOST_REPEATS, _LEAST_REPEATS = 200, 5
_BYTES_TO_MOVE = 256 << 20
SHORT_SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
_LEAST_SHORT, _MOST_SHORT = 3, 60
_PERIOD = 13
"""Inputs are repeating whole numbers, whose sums are exact, so every element that differs is wrong."""

# torch 2.13 has new names for these two, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = Any
CPU = torch.device("cpu")


class CollectiveCase:
    """One collective at one size on this rank: its tensors, its call, and the expected result."""

    def __init__(
        self, op: str, size_bytes: int, dtype: torch.dtype, rank: int, world: int, device: torch.device = CPU
    ) -> None:
        self.op, self.world, self.rank = op, world, rank
        parts = world if op in ("all_gather", "reduce_scatter") else 1
        each = max(1, size_bytes // dtype.itemsize // parts)
        self.count = each * parts
        """Elements of the longer side, which is the stated size."""
        self._pattern = (torch.arange(self.count, device=device) % _PERIOD).to(dtype)
        self._each = each
        self._input = self._pattern.clone()
        out = each if op == "reduce_scatter" else self.count if op == "all_gather" else 0
        self._output = torch.empty(out, dtype=dtype, device=device)

    def reset(self) -> None:
        """Element i of rank r is i modulo 13, plus r."""
        self._input.copy_(self._pattern).add_(self.rank)
        self._output.zero_()

    def call(self, group: Group) -> None:
        if self.op == "all_reduce":
            dist.all_reduce(self._input, group=group)
        elif self.op == "broadcast":
            dist.broadcast(self._input, 0, group=group)
        elif self.op == "reduce":
            dist.reduce(self._input, 0, group=group)
        elif self.op == "all_gather":
            _all_gather(self._output, self._input[: self._each], group=group)
        else:
            _reduce_scatter(self._output, self._input, group=group)

    def wrong(self, tolerance: float = 0.0) -> int:
        """Number of wrong elements on this rank: those further off than this share of the largest."""
        return sum(_differ(found, wanted, tolerance) for found, wanted in self._results())

    def _results(self) -> list[tuple[Tensor, Tensor]]:
        """The result on this rank, and the expected one."""
        ranks = self.world * (self.world - 1) // 2
        total = self._pattern * self.world + ranks
        if self.op == "all_reduce":
            return [(self._input, total)]
        if self.op == "broadcast":
            return [(self._input, self._pattern)]
        if self.op == "reduce":
            return [(self._input, total)] if self.rank == 0 else []
        if self.op == "reduce_scatter":
            return [(self._output, total[self.rank * self._each : (self.rank + 1) * self._each])]
        own = self._pattern[: self._each]
        return [(self._output, torch.cat([own + other for other in range(self.world)]))]


def measure(
    groups: Mapping[str, Group],
    op: str,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    repeats: int | None = None,
    tolerance: float = 0.0,
    link_bytes_per_s: float | None = None,
    device: Device | None = None,
) -> Iterator[CollectiveRow]:
    """Rows for each size and each group, by name; the same on every rank. The first group also aligns the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    common = next(iter(groups.values()))
    device = device or CpuDevice()
    for size_bytes in sizes:
        case = CollectiveCase(op, size_bytes, dtype, rank, world, device.torch_device)
        times: dict[str, list[float]] = {name: [] for name in groups}
        wrong = dict.fromkeys(groups, 0)
        for repeat in range(_WARM_UP + (repeats or repeats_for(size_bytes))):
            for name, group in groups.items():
                case.reset()
                dist.barrier(group=common)
                device.synchronize()
                began = time.perf_counter()
                case.call(group)
                device.synchronize()  # a collective returns before a GPU has done it
                took_s = time.perf_counter() - began
                if repeat >= _WARM_UP:
                    times[name].append(took_s)
                wrong[name] = max(wrong[name], case.wrong(tolerance))
        for name in groups:
            time_s = _agreed(statistics.median(times[name]), dist.ReduceOp.MAX, common, device.torch_device)
            yield CollectiveRow(
                backend=name,
                op=op,
                size_bytes=case.count * dtype.itemsize,
                count=case.count,
                dtype=str(dtype).removeprefix("torch.").replace("float32", "float"),
                redop="sum" if op in ("all_reduce", "reduce", "reduce_scatter") else "",
                world=world,
                time_s=time_s,
                wrong=int(_agreed(float(wrong[name]), dist.ReduceOp.SUM, common, device.torch_device)),
                link_bytes_per_s=link_bytes_per_s,
            )


def short(
    *, seconds: float = 5.0, link_bytes_per_s: float | None = None, device: Device | None = None
) -> list[CollectiveRow]:
    """A short table of all-reduces in the default group. Call it on every rank, and print it on one.

        for line in potluck.report.collective_table.table(potluck.probe.collectives.short()):
            print(line)

    Sizes grow from 4 KiB while the next one will probably end in time, so a slow link measures only small ones.
    `device`: where the tensors are (`potluck.device.pick("cuda")`); the CPU if not given. All ranks decide by the
    same figures, so none is left behind.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group", hint="call torch.distributed.init_process_group('potluck') first"
        )
    name = dist.get_backend()
    device = device or CpuDevice()
    if device.kind not in dist.get_backend_config():
        raise UserError(
            f"the backend {name} takes no {device.kind.upper()} tensors",
            hint="init_process_group('cpu:gloo,cuda:nccl'), or 'potluck', or short(device=...)",
        )
    rows: list[CollectiveRow] = []
    left_s = seconds
    for number, size in enumerate(SHORT_SIZES):
        guessed_s = rows[-1].time_s * min(size / rows[-1].size_bytes, 4.0) if rows else 0.0
        share_s = left_s / (len(SHORT_SIZES) - number)
        if guessed_s * (_WARM_UP + _LEAST_SHORT) > left_s:
            break
        repeats = int(min(_MOST_SHORT, max(_LEAST_SHORT, share_s / guessed_s))) if guessed_s > 0 else _LEAST_SHORT
        groups = {str(name): dist.group.WORLD}
        rows += measure(
            groups, "all_reduce", [size], repeats=repeats, link_bytes_per_s=link_bytes_per_s, device=device
        )
        # Two barriers and the check of every element come on top: some such time again.
        left_s -= 2 * rows[-1].time_s * (_WARM_UP + repeats)
    return rows


def repeats_for(size_bytes: int) -> int:
    """Number of repetitions: more for small sizes, whose times scatter most."""
    return max(_LEAST_REPEATS, min(_MOST_REPEATS, _BYTES_TO_MOVE // max(size_bytes, 1)))


def _differ(found: Tensor, wanted: Tensor, tolerance: float) -> int:
    if tolerance == 0:
        return int((found != wanted).sum())
    near = tolerance * float(wanted.abs().max())
    return int((~((found - wanted).abs() <= near)).sum())  # so that what is no number counts as wrong


def _agreed(value: float, op: Any, group: Group, device: torch.device) -> float:
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op, group=group)
    return float(held.item())
