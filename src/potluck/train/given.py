"""Checks the arguments of `run.steps` before anything is built, and explains what cannot work.

Owns these checks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from potluck.errors import ConfigError, LoopError

NO_SCALER = (
    "take the GradScaler out and use torch.autocast(run.device.type, dtype=torch.bfloat16): bf16 has the range of "
    "float32, so its gradients do not underflow and need no scaling"
)
ONE_OPTIMIZER = (
    "put all parameters into one, as groups: torch.optim.AdamW([{'params': …, 'lr': …}, {'params': …}]); "
    "optimizers that take turns (a GAN) need a plain loop on one machine"
)


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise LoopError(
            f"the model is of type {type(model).__name__}, not an nn.Module",
            hint="run.steps(model, optimizer, dataset, global_batch=…), in this order",
        )
    if isinstance(model, nn.DataParallel):
        raise LoopError(
            "the model is wrapped in DataParallel, but one process trains on one device",
            hint="give run.steps() the plain model; several GPUs: torchrun --nproc-per-node N -m potluck host …",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LoopError(
            "the model is wrapped in DistributedDataParallel, which would sum the gradients a second time",
            hint="give run.steps() the plain model: Potluck sums over the ranks, once a step",
        )
    if _is_sharded(model):
        raise LoopError(
            "the model is sharded over the ranks (FSDP or tensor parallelism), but every rank of a host holds a "
            "whole one",
            hint="give run.steps() the plain model; one that does not fit into a GPU cannot be trained here",
        )


def _is_sharded(model: nn.Module) -> bool:
    """Whether it has DTensors (FSDP2, tensor parallelism), or a part of it is wrapped by FSDP1, whose parameters
    are plain tensors."""
    classes = (base for each in model.modules() for base in type(each).__mro__)
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in classes) or any(
        hasattr(parameter, "device_mesh") for parameter in model.parameters()
    )


def check_optimizer(optimizer: Any, trained: Iterable[nn.Parameter]) -> None:
    if isinstance(optimizer, list | tuple | dict):
        raise LoopError(
            f"run.steps() takes one optimizer, not a {type(optimizer).__name__} of {len(optimizer)}",
            hint=ONE_OPTIMIZER,
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LoopError(
            f"the optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer",
            hint="run.steps(model, optimizer, dataset, global_batch=…), in this order",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LoopError(
            "LBFGS computes the loss several times in one update, but the samples of a step are computed once",
            hint="use an optimizer whose step() takes no closure: AdamW, SGD, …",
        )
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for p in trained}
    if held.keys().isdisjoint(ours):
        raise LoopError(
            "the optimizer holds none of the model's trained parameters: it would train nothing",
            hint="create it from model.parameters(), after moving or wrapping the model",
        )
    if strange := [tuple(p.shape) for at, p in held.items() if p.requires_grad and at not in ours]:
        # Nobody would clear, average or send their gradients, and no checkpoint would have them.
        raise LoopError(
            f"the optimizer holds {len(strange)} trained parameter{'s' if len(strange) > 1 else ''} that the model "
            f"does not have, the first of shape {strange[0]}",
            hint="assign them to the model: model.scale = nn.Parameter(…); several models into one nn.ModuleList",
        )


def check_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Refuse a layer that was unfrozen after the run began: guests hold it fixed, and its gradient is not
    averaged."""
    if any(p.requires_grad for p in frozen.values()):
        name = next(name for name, p in frozen.items() if p.requires_grad)
        raise LoopError(
            f"{name} was frozen when the training began, and is trained now",
            hint="unfreeze it before run.steps(), with a learning rate of 0 until you need it",
        )


def held(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters the optimizer has."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def check_added(optimizer: torch.optim.Optimizer, trained: Iterable[nn.Parameter]) -> None:
    """Refuse parameters that were added to the optimizer after the run began: nobody clears, averages or sends
    their gradients."""
    ours = {id(p) for p in trained}
    added = [
        p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours and p.requires_grad
    ]
    if added:
        raise LoopError(
            f"the optimizer was given {len(added)} more parameter{'s' if len(added) > 1 else ''} after the "
            f"training began, the first of shape {tuple(added[0].shape)}",
            hint="build all layers before run.steps(), with a learning rate of 0 until you need them",
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"the scheduler is of type {type(scheduler).__name__}, which has no step()",
            hint="combine several with torch.optim.lr_scheduler.SequentialLR or ChainedScheduler",
        )
    if isinstance(scheduler, LRScheduler) and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "the scheduler belongs to another optimizer", hint="create it with the optimizer that run.steps() gets"
        )
    if takes_loss(scheduler):
        return
    if wanted := _required(scheduler.step):
        raise ConfigError(
            f"the scheduler's step() needs {', '.join(wanted)}, which Potluck cannot know",
            hint="call its step(…) yourself after each step, and save it with also_save={'scheduler': …}",
        )


def as_number(name: str, value: Any) -> float | None:
    """The value given to run.log(): a number, or a tensor or array of one value; None if it is not finite."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError(value)
        number = float(value)
        return number if math.isfinite(number) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise LoopError(
            f"run.log() was given a {type(value).__name__} as {name}",
            hint="it takes numbers: run.log(accuracy=0.93)",
        ) from None


def check_saved(objects: Iterable[Any]) -> None:
    if any(isinstance(each, torch.amp.GradScaler) for each in objects):
        raise ConfigError("a GradScaler is not needed, and would scale the gradients wrongly", hint=NO_SCALER)


def takes_loss(scheduler: Any) -> bool:
    """Whether its step() is given the step's loss."""
    return isinstance(scheduler, ReduceLROnPlateau)


def called_by_scaler() -> bool:
    """Whether a GradScaler is among the callers."""
    return any(isinstance(frame.frame.f_locals.get("self"), torch.amp.GradScaler) for frame in inspect.stack(0))


def _required(function: Any) -> list[str]:
    """Parameters that must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    either = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in (*either, p.KEYWORD_ONLY)]
