"""Sums the gradients of several ranks: one all-reduce a step, in buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 32 << 20
"""Gradients are joined into buckets up to this size, because one all-reduce for each would cost more than its
bytes."""
IN_FLIGHT = 3
"""Buckets in flight; more would only use more memory."""


def add_up(
    trained: Sequence[nn.Parameter], totals: Sequence[Tensor | float], *, finite: Tensor, sums: Any, control: Any
) -> Tensor:
    """Every rank's gradients become the ranks' sum; also, [totals + ranks] on the device, the sums of their
    `totals` and a 1 for each rank whose own gradient was not `finite`, a bool on the device.

    `control` is a group for what is on the CPU: which parameters were used. A parameter that only some ranks used
    gets zeros on the others. One that no rank used stays without a gradient, as on one machine.
    """
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=control)
    gradients = []
    for parameter, is_used in zip(trained, used.tolist()):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    total = torch.zeros(len(totals) + dist.get_world_size(sums), dtype=torch.float64, device=trained[0].device)
    for place, value in enumerate(totals):
        total[place] += value.detach() if isinstance(value, Tensor) else value
    total[len(totals) + dist.get_rank(sums)] = ~finite
    under_way: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    under_way.append((dist.all_reduce(total, group=sums, async_op=True), total, [total]))
    for bucket in _buckets(gradients):
        whole = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if whole else torch.cat([g.reshape(-1) for g in bucket])
        under_way.append((dist.all_reduce(flat, group=sums, async_op=True), flat, bucket))
        if len(under_way) > IN_FLIGHT:
            _land(*under_way.popleft())
    while under_way:
        _land(*under_way.popleft())
    return total


def _land(work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    if flat is bucket[0]:
        return
    parts = flat.split([g.numel() for g in bucket])
    torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket)])


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, together at most BUCKET_BYTES; a larger one is alone."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def hashes(tensors: Sequence[Tensor]) -> Tensor:
    """[tensors] int64 on the CPU: hashes of the tensors' bits."""
    return torch.stack([torch.hash_tensor(t.detach()).view(torch.int64) for t in tensors]).cpu()
