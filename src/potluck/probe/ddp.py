"""Measures how fast a small GPT trains under stock DistributedDataParallel on the group that is up.

The training is a user's: only the model comes from Potluck.
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

from potluck.spec.collectives import bus_factor
from potluck.train.recipes.gpt import BYTES, GptConfig, GptRecipe

_WARM_UP = 2


class DdpJob(Struct, frozen=True, kw_only=True):
    """What is trained; every process has its own samples."""

    depth: int = 4
    sequence: int = 128
    batch: int = 4
    """Samples that each process computes in a step."""
    steps: int = 8
    seed: int = 1


class Trained(Struct, frozen=True, kw_only=True):
    """What was measured, the same on every rank."""

    backend: str
    world: int
    where: str
    """What is between the ranks: memory or tcp; nothing where there is one process."""
    tokens_per_s: float
    step_s: float
    gradient_bytes: int
    all_reduce_s: float | None
    """Reducing as many bytes as there are gradients, alone: as long as one step needs on the network."""
    computed_s: float | None
    """2(N-1)/N times the gradients' bytes, over the link's measured rate."""
    exposed_s: float | None
    """What a step takes longer than one without any exchange: the part that is not hidden behind backward."""
    loss: float
    """Loss of the last step, averaged over the ranks."""


def train(job: DdpJob, backend: str, link_bytes_per_s: float | None, where: str, group: Any = None) -> Trained:
    """Train some steps on a group, or on the default one, or alone where there is none."""
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    config = GptConfig(depth=job.depth, sequence=job.sequence, seed=job.seed)
    plain = GptRecipe().model(config)
    model: nn.Module = DistributedDataParallel(plain, process_group=group) if world > 1 else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    chance = torch.Generator().manual_seed(1000 + rank)

    def step(exchange: bool = True) -> tuple[float, Tensor]:
        samples = torch.randint(0, BYTES, (job.batch, job.sequence + 1), generator=chance)
        if world > 1:
            dist.barrier(group)
        began = time.perf_counter()
        if exchange or not isinstance(model, DistributedDataParallel):
            loss = _backward(model, samples)
            optimizer.step()
        else:
            with model.no_sync():
                loss = _backward(model, samples)
            optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began, loss

    times, losses = [], []
    for _ in range(_WARM_UP + job.steps):
        took_s, loss = step()
        times.append(took_s)
        losses.append(loss)
    step_s = _largest(statistics.median(times[_WARM_UP:]), world, group)
    nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    alone_s = all_reduce_s = None
    if world > 1:
        # From here on every rank goes its own way; the loss has been taken before.
        alone = [step(exchange=False)[0] for _ in range(max(3, job.steps // 2))]
        alone_s = _largest(statistics.median(alone), world, group)
        all_reduce_s = _largest(_reduce_alone(nbytes, group), world, group)
    return Trained(
        backend=backend if world > 1 else "none",
        world=world,
        where=where,
        tokens_per_s=world * job.batch * job.sequence / step_s,
        step_s=step_s,
        gradient_bytes=nbytes,
        all_reduce_s=all_reduce_s,
        computed_s=bus_factor("all_reduce", world) * nbytes / link_bytes_per_s if link_bytes_per_s else None,
        exposed_s=None if alone_s is None else max(0.0, step_s - alone_s),
        loss=_mean(losses[-1], world, group),
    )


def _backward(model: nn.Module, samples: Tensor) -> Tensor:
    loss = F.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def _reduce_alone(nbytes: int, group: Any) -> float:
    values = torch.zeros(nbytes // 4)
    times = []
    for _ in range(6):
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _largest(value: float, world: int, group: Any) -> float:
    if world == 1:
        return value
    held = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
    return float(held.item())


def _mean(value: Tensor, world: int, group: Any) -> float:
    held = value.to(torch.float64).reshape(1).clone()
    if world > 1:
        dist.all_reduce(held, group=group)
    return float(held.item()) / world
