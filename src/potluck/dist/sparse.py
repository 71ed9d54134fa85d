"""The sum of sparse tensors over all ranks: owns how many of them meet.

It must not know how bytes travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.dist.lane import Call
from potluck.dist.paths import CollectivePath


@torch.no_grad()
def all_reduce(path: CollectivePath, call: Call, world: int, tensor: Tensor) -> None:
    """In place. Everybody gets everybody's entries, padded to the longest, and adds them up in rank order."""
    mine = tensor.detach().coalesce().cpu()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    path.all_gather(call, counts, torch.tensor([mine._nnz()]))
    longest = int(max(int(count) for count in counts))
    indices = _gathered(path, call, world, mine.indices().t().contiguous(), longest)
    values = _gathered(path, call, world, mine.values().contiguous(), longest)
    total = torch.sparse_coo_tensor(
        torch.cat([rows[: int(count)] for rows, count in zip(indices, counts, strict=True)]).t(),
        torch.cat([rows[: int(count)] for rows, count in zip(values, counts, strict=True)]),
        tensor.shape,
        check_invariants=False,
    ).coalesce()
    tensor.copy_(total.to(tensor.device))  # not of detach(): the number of entries would stay what it was


def _gathered(path: CollectivePath, call: Call, world: int, rows: Tensor, longest: int) -> list[Tensor]:
    """Every rank's rows, each list as long as the longest."""
    padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype)
    padded[: rows.shape[0]] = rows
    outputs = [torch.empty_like(padded) for _ in range(world)]
    path.all_gather(call, [output.view(-1) for output in outputs], padded.view(-1))
    return outputs
