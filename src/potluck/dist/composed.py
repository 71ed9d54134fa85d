"""Collectives made of other collectives: the sum of sparse tensors, and a reduce-scatter with unequal parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.dist.network_collectives import Collectives
from potluck.dist.record import Call
from potluck.dist.reduction import Op


def uneven_reduce_scatter(
    collectives: Collectives, call: Call, rank: int, output: Tensor, inputs: Sequence[Tensor], op: Op
) -> None:
    """Reduce each part to its owner, one after the other: the same bytes as with equal parts, in more steps."""
    for owner, part in enumerate(inputs):
        values = part.clone()
        collectives.reduce(call, values, op, owner)
        if owner == rank:
            output.copy_(values)


@torch.no_grad()
def sparse_all_reduce(collectives: Collectives, call: Call, world: int, tensor: Tensor) -> None:
    """Sum in place. Every rank gets all entries, padded to the longest, and adds them in the order of the ranks."""
    mine = tensor.detach().coalesce().cpu()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    collectives.all_gather(call, counts, torch.tensor([mine._nnz()]))
    longest = int(max(int(count) for count in counts))

    def gathered(rows: Tensor) -> Tensor:
        """Every rank's rows, concatenated."""
        padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype)
        padded[: rows.shape[0]] = rows
        outputs = [torch.empty_like(padded) for _ in range(world)]
        collectives.all_gather(call, [output.view(-1) for output in outputs], padded.view(-1))
        return torch.cat([rows[: int(count)] for rows, count in zip(outputs, counts, strict=True)])

    indices, values = gathered(mine.indices().t().contiguous()), gathered(mine.values().contiguous())
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
    tensor.copy_(total.to(tensor.device))  # not into detach(): it would keep its number of entries
