"""What ranks do in the tests of the ways an all-reduce can go: numbers that are rounded, and their bits.

It knows the backend's interface alone.
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COUNTS = (1, 2, 5, 1023, 1024, 1025, 40_000)
"""Fewer numbers than ranks, chunks that do not come out even, many chunks."""


def sums(rank: int, world: int, algorithm: str) -> list[tuple[int, float]]:
    """For each case: a number for the bits that this rank got, and how far they are from the truth."""
    from potluck.dist import Config

    config = Config(transport="tcp", algorithm=algorithm, chunk_bytes=4096, small_bytes=0)
    dist.init_process_group("potluck", pg_options=config, timeout=timedelta(seconds=30))
    try:
        found = []
        for count in COUNTS:
            for dtype in (torch.float32, torch.bfloat16):
                for op in ("SUM", "AVG"):
                    found.append(_one(rank, world, count, dtype, op))
        found.append(_premultiplied(rank, world))
        return found
    finally:
        dist.destroy_process_group()


def _numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank * 7919 + count)).to(dtype)


def _judged(found: torch.Tensor, wanted: torch.Tensor) -> tuple[int, float]:
    bits = zlib.crc32(found.view(torch.uint8).numpy().tobytes())
    return bits, float((found.double() - wanted).abs().max() / (1 + wanted.abs().max()))


def _one(rank: int, world: int, count: int, dtype: torch.dtype, op: str) -> tuple[int, float]:
    tensor = _numbers(rank, count, dtype)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    wanted = sum(_numbers(other, count, dtype).double() for other in range(world))
    assert isinstance(wanted, torch.Tensor)
    return _judged(tensor, wanted / world if op == "AVG" else wanted)


def _premultiplied(rank: int, world: int) -> tuple[int, float]:
    """Every rank's values times its number + 1."""
    tensor = _numbers(rank, 3000, torch.float32)
    op: Any = dist._make_nccl_premul_sum(float(rank + 1))  # type: ignore[attr-defined]
    dist.all_reduce(tensor, op)
    wanted = sum(_numbers(other, 3000, torch.float32).double() * (other + 1) for other in range(world))
    assert isinstance(wanted, torch.Tensor)
    return _judged(tensor, wanted)
