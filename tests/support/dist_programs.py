"""What ranks train in the tests of other people's programs: the model of dist_training, each in its program's way.

It knows of Potluck only the name of its backend.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.dist_training import batch, losses, model

LR = 0.5
STEPS = 6


@contextmanager
def _group(backend: str = "potluck") -> Iterator[None]:
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mean(mine: list[float]) -> list[float]:
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.tolist()


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=LR)


def _as_torchrun(rank: int) -> None:
    """Lightning looks whether it has been started by torchrun; where not, it starts the ranks itself."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", LOCAL_RANK=str(rank), GROUP_RANK="0")


# -- programs that others wrote


def accelerate(rank: int, world: int, cpu: bool = True) -> tuple[list[float], str]:
    """Its losses, and what the model has become."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    with _group():
        try:
            accelerator = Accelerator(cpu=cpu)
            inner = model()
            wrapped, optimizer = accelerator.prepare(inner, _sgd(inner))
            found = []
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = wrapped(batch(rank, step)).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                found.append(float(accelerator.gather(loss.detach()).mean()))
            return found, type(wrapped).__name__
        finally:
            AcceleratorState._reset_state(True)


def accelerate_told_the_backend(rank: int, world: int) -> str:
    """How Accelerate answers to a backend that it does not know."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    try:
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="potluck")])
    except ValueError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(True)
    return ""


def lightning(rank: int, world: int) -> dict[str, Any]:
    """The Trainer's metrics, which it has averaged over the ranks, and its module's weights."""
    warnings.simplefilter("ignore")
    _as_torchrun(rank)
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, inputs: Tensor, step: int) -> Tensor:
            loss: Tensor = self.net(inputs).pow(2).mean()
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.log("whole", torch.tensor(3 + 4 * self.global_rank), sync_dist=True)
            return loss

        def validation_step(self, inputs: Tensor, step: int) -> None:
            self.log("held out", self.net(inputs).pow(2).mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _sgd(self)

    rows = torch.cat([batch(rank, step) for step in range(STEPS)])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend="potluck"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    loader: Any = DataLoader(rows, batch_size=len(rows) // STEPS)  # type: ignore[arg-type]
    module = Module()
    try:
        trainer.fit(module, loader, loader)
        assert dist.get_backend() == "potluck"
        weights = float(torch.cat([p.detach().flatten() for p in module.parameters()]).double().sum())
        return {"weights": weights, **{name: float(value) for name, value in trainer.callback_metrics.items()}}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fabric(rank: int, world: int) -> tuple[list[float], int]:
    """Its losses, and its average of the whole numbers 3 and 8."""
    warnings.simplefilter("ignore")
    _as_torchrun(rank)
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    made = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="potluck"))
    made.launch()
    try:
        inner = model()
        wrapped, optimizer = made.setup(inner, _sgd(inner))
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = wrapped(batch(rank, step)).pow(2).mean()
            made.backward(loss)
            optimizer.step()
            found.append(float(made.all_reduce(loss.detach(), reduce_op="mean")))  # type: ignore[arg-type]
        return found, int(made.all_reduce(torch.tensor(3 + 5 * rank), reduce_op="mean"))  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def deepspeed(rank: int, world: int) -> list[list[float]]:
    """The losses with each stage of ZeRO, in one group: DeepSpeed keeps the first it finds."""
    _as_torchrun(rank)
    with _group():
        return [_deepspeed(rank, stage) for stage in (0, 1, 2, 3)]


def _deepspeed(rank: int, stage: int) -> list[float]:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    inner = model()
    engine, *_ = deepspeed.initialize(model=inner, optimizer=_sgd(inner), config=settings)
    found = []
    for step in range(STEPS):
        loss = engine(batch(rank, step)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return _mean(found)


def ray_loop(settings: dict[str, str]) -> None:
    """What Ray Train runs in each of its workers, which have their group already."""
    from ray.train.torch import prepare_model

    wrapped = prepare_model(model())
    found = _mean(losses(wrapped, _sgd(wrapped), [dist.get_rank()]))
    if dist.get_rank() == 0:
        told = {"losses": found, "backend": dist.get_backend(), "wrapped": type(wrapped).__name__}
        Path(settings["file"]).write_text(json.dumps(told))


# -- the ways in which they train


class Sharded(torch.optim.Optimizer):
    """nanochat's way: each rank updates its part of a parameter, and waits for the futures of all collectives."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        parameters = [p for group in self.param_groups for p in group["params"]]
        arriving, parts = [], []
        for p in parameters:
            part = torch.empty_like(p.grad[: p.shape[0] // world])
            work: Any = dist.reduce_scatter_tensor(part, p.grad, op=dist.ReduceOp.AVG, async_op=True)
            arriving.append(work.get_future())
            parts.append(part)
        leaving = []
        for p, part, future in zip(parameters, parts, arriving, strict=True):
            future.wait()
            rows = p.shape[0] // world
            mine = p[rank * rows : (rank + 1) * rows]
            mine.add_(part, alpha=-LR)
            work = dist.all_gather_into_tensor(p, mine.clone(), async_op=True)
            leaving.append(work.get_future())
        torch.futures.collect_all(leaving).wait()


def nanochat(rank: int, world: int, backend: str = "potluck") -> list[float]:
    with _group(backend):
        trained = model()
        return _mean(losses(trained, Sharded(trained.parameters()), [rank]))


def fsdp1(rank: int, world: int) -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")
    with _group():
        cpu = torch.device("cpu")
        sharded = FullyShardedDataParallel(model(), device_id=cpu, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))
        return _mean(losses(sharded, _sgd(sharded), [rank]))


def tensor_parallel(rank: int, world: int) -> list[float]:
    """DTensor: the first layer by columns, the second by rows; every rank has the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with _group():
        mesh = init_device_mesh("cpu", (world,))
        split = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return losses(split, _sgd(split), list(range(world)))


def pipelined(rank: int, world: int) -> list[float]:
    """Two stages, a micro-batch for each rank of the others."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    with _group():
        layers = list(model())
        stage = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
        optimizer = _sgd(stage)
        part = PipelineStage(stage, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(part, n_microbatches=world, loss_fn=lambda out, _: out.pow(2).mean())
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            rows = torch.cat([batch(which, step) for which in range(world)])
            each: list[Tensor] = []
            if rank == 0:
                schedule.step(rows)
            else:
                schedule.step(target=rows, losses=each)
            optimizer.step()
            loss = torch.stack(each).mean().detach() if each else torch.zeros(())
            dist.broadcast(loss, world - 1)
            found.append(float(loss))
        return found


def checkpointed(rank: int, world: int) -> list[float]:
    """FSDP2, saved by torch.distributed.checkpoint after half of the steps and loaded into a fresh model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    with _group():
        mesh = init_device_mesh("cpu", (world,))
        place = [tempfile.mkdtemp(prefix="potluck-dcp-") if rank == 0 else None]
        dist.broadcast_object_list(place)

        def sharded() -> nn.Sequential:
            net = model()
            for layer in net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(net, mesh=mesh)

        first = sharded()
        _train(first, rank, range(STEPS // 2))
        dcp.save(get_model_state_dict(first), checkpoint_id=place[0])
        second = sharded()
        state = get_model_state_dict(second)
        dcp.load(state, checkpoint_id=place[0])
        set_model_state_dict(second, state)
        found = _mean(_train(second, rank, range(STEPS // 2, STEPS)))
        if rank == 0:
            shutil.rmtree(str(place[0]))
        return found


def _train(net: nn.Module, rank: int, steps: range) -> list[float]:
    optimizer, found = _sgd(net), []
    for step in steps:
        optimizer.zero_grad()
        loss = net(batch(rank, step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def sharded_optimizer(rank: int, world: int) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with _group():
        wrapped = nn.parallel.DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=LR)
        return _mean(losses(wrapped, optimizer, [rank]))
