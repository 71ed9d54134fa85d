"""Measures how fast a small GPT trains under stock DistributedDataParallel on the present group.

The training loop is like a user's: only the model comes from Potluck.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from potluck.device.base import Device
from potluck.probe.slowest_link import SlowestLink
from potluck.spec.collective_rows import bus_factor
from potluck.spec.ddp_rows import DdpRow, share
from potluck.train.recipes.gpt import BYTES, GptConfig, GptRecipe

_WARM_UP = 2
ALONE = SlowestLink(None, "", 1)


class DdpJob(Struct, frozen=True, kw_only=True):
    """The workload."""

    depth: int = 4
    sequence: int = 128
    batch: int = 4
    """Samples of each process in a step."""
    global_batch: int | None = None
    """Samples of a step over all processes, the same for any number of them. Replaces `batch`."""
    steps: int = 8
    seed: int = 1

    def samples_for(self, world: int) -> int:
        """Samples of each process in a step."""
        return self.batch if self.global_batch is None else share(self.global_batch, world)


class _RankSamples:
    """The samples of one rank in each step: its own, or its part of a global batch."""

    def __init__(self, job: DdpJob, rank: int, world: int) -> None:
        each = job.samples_for(world)
        common = job.global_batch is not None
        self._chance = torch.Generator().manual_seed(1000 + (0 if common else rank))
        self._shape = (each * world if common else each, job.sequence + 1)
        self._own = slice(rank * each, (rank + 1) * each) if common else slice(each)

    def draw(self) -> Tensor:
        return torch.randint(0, BYTES, self._shape, generator=self._chance)[self._own]


def train(job: DdpJob, backend: str, device: Device, link: SlowestLink = ALONE, group: Any = None) -> DdpRow:
    """Train some steps on a group, on the default group, or alone without one."""
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    config = GptConfig(depth=job.depth, sequence=job.sequence, seed=job.seed)
    plain = GptRecipe().model(config).to(device.torch_device)
    model: nn.Module = DistributedDataParallel(plain, process_group=group) if world > 1 else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    own = _RankSamples(job, rank, world)

    def step(exchange: bool = True) -> tuple[float, Tensor]:
        samples = own.draw().to(device.torch_device)
        if world > 1:
            dist.barrier(group)
        device.synchronize()
        began = time.perf_counter()
        if exchange or not isinstance(model, DistributedDataParallel):
            loss = _backward(model, samples)
            optimizer.step()
        else:
            with model.no_sync():
                loss = _backward(model, samples)
            optimizer.step()
        optimizer.zero_grad()
        device.synchronize()
        return time.perf_counter() - began, loss

    times, losses = [], []
    for _ in range(_WARM_UP + job.steps):
        took_s, loss = step()
        times.append(took_s)
        losses.append(loss)
    step_s = _largest(statistics.median(times[_WARM_UP:]), world, device, group)
    nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    alone_s = all_reduce_s = None
    if world > 1:
        # From here on every rank goes its own way; the loss has been taken before.
        alone = [step(exchange=False)[0] for _ in range(max(3, job.steps // 2))]
        alone_s = _largest(statistics.median(alone), world, device, group)
        all_reduce_s = _largest(_reduce_alone(nbytes, device, group), world, device, group)
    rate = link.bytes_per_s_of(backend)
    global_batch = world * job.samples_for(world)
    return DdpRow(
        backend=backend if world > 1 else "none",
        world=world,
        machines=link.machines,
        kind=device.kind,  # type: ignore[arg-type]  # one of these three, as the command line checks
        gpus=_gpus(device, world, group),
        device=device.label,
        where=link.kind,
        depth=job.depth,
        sequence=job.sequence,
        steps=job.steps,
        global_batch=global_batch,
        tokens_per_s=global_batch * job.sequence / step_s,
        step_s=step_s,
        gradient_bytes=nbytes,
        all_reduce_s=all_reduce_s,
        computed_s=bus_factor("all_reduce", world) * nbytes / rate if rate else None,
        exposed_s=None if alone_s is None else max(0.0, step_s - alone_s),
        loss=_mean(losses[-1], world, group),
    )


def _backward(model: nn.Module, samples: Tensor) -> Tensor:
    loss = F.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def _reduce_alone(nbytes: int, device: Device, group: Any) -> float:
    values = torch.zeros(nbytes // 4, device=device.torch_device)
    times = []
    for _ in range(6):
        dist.barrier(group)
        device.synchronize()
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        device.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _gpus(device: Device, world: int, group: Any) -> int:
    """Number of GPUs that compute: one for each rank, or one shared by all."""
    if device.kind == "cpu":
        return 0
    index = device.torch_device.index or 0
    apart = _largest(index, world, device, group) + _largest(-index, world, device, group)
    return world if apart else 1


def _largest(value: float, world: int, device: Device, group: Any) -> float:
    if world == 1:
        return value
    held = torch.tensor([value], dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
    return float(held.item())


def _mean(value: Tensor, world: int, group: Any) -> float:
    if world == 1:
        return float(value.item())
    held = value.to(torch.float64).reshape(1).clone()
    dist.all_reduce(held, group=group)
    return float(held.item()) / world
