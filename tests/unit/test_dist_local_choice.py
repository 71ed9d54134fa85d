"""Which way a reduction within one machine takes: the short one for small sums, turns for long ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from potluck.dist import reduction
from potluck.dist.local_collectives import LocalGroup
from potluck.dist.local_memory import Sizes
from potluck.dist.record import Call, Header


class Memory:
    sizes = Sizes()


@pytest.mark.parametrize(
    ("op", "count", "dtype", "size", "way"),
    [
        (reduction.plain(dist.ReduceOp.SUM), 1024, torch.float32, 3, "_sum_small"),  # as the process group asks
        (dist.ReduceOp.SUM, 1024, torch.float32, 3, "_sum_small"),
        ("SUM", 1 << 18, torch.float32, 3, "_reduce_in_parts"),
        ("SUM", 1 << 18, torch.float32, 2, "_sum_small"),
        ("MAX", 1 << 18, torch.float32, 2, "_reduce_everywhere"),
        ("SUM", (1 << 18) + 1, torch.float32, 2, "_reduce_along"),
        ("MAX", 1 << 20, torch.bfloat16, 3, "_reduce_along"),
        ("SUM", 1 << 20, torch.float32, 64, "_reduce_in_parts"),
        ("SUM", (1 << 20) + 1, torch.float32, 64, "_reduce_along"),  # more than a slot holds
        ("SUM", 1024, torch.bfloat16, 3, "_reduce_everywhere"),
        ("MAX", 1024, torch.float32, 3, "_reduce_everywhere"),
    ],
)
def test_the_way_of_an_all_reduce(
    monkeypatch: pytest.MonkeyPatch, op: Any, count: int, dtype: torch.dtype, size: int, way: str
) -> None:
    taken = []
    for name in ("_sum_small", "_reduce_in_parts", "_reduce_everywhere", "_reduce_along"):
        monkeypatch.setattr(LocalGroup, name, lambda self, *args, name=name: taken.append(name))
    group = LocalGroup.__new__(LocalGroup)
    group._memory, group.size = Memory(), size  # type: ignore[assignment]
    group.all_reduce(Call(Header(op="all_reduce"), 1, 0.0, 1.0), torch.ones(count, dtype=dtype), op)
    assert taken == [way]
