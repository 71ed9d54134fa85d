"""What ranks train in the tests: a small model with stock DDP and FSDP2, on any backend.

It knows of Potluck only the name of its backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_left_alone: list[Any] = []


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(1000 * step + rank))


def losses(trained: Any, optimizer: torch.optim.Optimizer, ranks: list[int], device: str = "cpu") -> list[float]:
    """One loss a step, of this rank's batch, or the mean of several's."""
    found = []
    for step in range(6):
        optimizer.zero_grad()
        loss = torch.stack([trained(batch(rank, step).to(device)).pow(2).mean() for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(loss.cpu()) for loss in found]


def alone(world: int) -> list[float]:
    """The same training in one process: the mean loss over all ranks' batches."""
    single = model()
    return losses(single, torch.optim.SGD(single.parameters(), lr=0.5), list(range(world)))


def ddp(rank: int, world: int, backend: str, device: str = "cpu", compiled: bool = False) -> list[float]:
    import potluck

    assert potluck.__version__
    if device == "fake" and rank == world - 1:
        # The last rank computes on another kind of device than the others.
        from support import fake_device

        fake_device.install()
    else:
        device = "cpu"
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    try:
        # Small buckets: several all-reduces are under way beside the backward. torch.compile wants larger ones.
        inner = model().to(device)
        wrapped = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=1 if compiled else 0.01)
        trained = torch.compile(wrapped, backend="eager") if compiled else wrapped
        mine = losses(trained, torch.optim.SGD(wrapped.parameters(), lr=0.5), [rank], device)
        mean = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(mean, dist.ReduceOp.AVG if backend == "potluck" else dist.ReduceOp.SUM)
        if backend == "gloo":
            # When its group ends, gloo waits for its threads, now and then for ever: left to the end of all.
            _left_alone.extend([wrapped, dist.group.WORLD])
        return (mean if backend == "potluck" else mean / world).tolist()
    finally:
        dist.destroy_process_group()


def fsdp(rank: int, world: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import potluck

    assert potluck.__version__
    dist.init_process_group("potluck", timeout=timedelta(seconds=30))
    try:
        mesh = init_device_mesh("cpu", (world,))
        sharded = model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        mine = losses(sharded, torch.optim.SGD(sharded.parameters(), lr=0.5), [rank])
        mean = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        return mean.tolist()
    finally:
        dist.destroy_process_group()


def hooked(rank: int, world: int, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Stock gloo with a communication hook, by case: "CODEC", "CODEC bfloat16", "CODEC without" (feedback)."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        return {case: _with_hook(case, world) for case in cases}
    finally:
        dist.destroy_process_group()


def _with_hook(case: str, world: int) -> dict[str, Any]:
    """Some steps of a regression with one fixed batch for each rank; the loss over both at the end."""
    from potluck.dist.hooks import compress

    codec, _, extra = case.partition(" ")
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4))
    if extra == "bfloat16":
        net = net.to(torch.bfloat16)
    wrapped = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)  # several buckets
    state = None
    if codec != "exact":
        state = compress(wrapped, codec, feedback=extra != "without", start_step=4)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2, momentum=0.5)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(64, 32, generator=generator).to(dtype)
    wanted = torch.stack([inputs[:, i] * inputs[:, i + 1] for i in range(4)], 1)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), wanted).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs), wanted).float()
    dist.all_reduce(loss)
    weights = torch.cat([p.detach().float().flatten() for p in net.parameters()])
    result: dict[str, Any] = {"loss": loss.item() / world, "weights": weights.double().sum().item()}
    if state is not None:
        result |= {"sent": state.sent_bytes, "exact": state.exact_bytes}
    return result
