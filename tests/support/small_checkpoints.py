"""Checkpoints of a small model whose parameters all have one value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from potluck.train.checkpoint import Snapshot, save


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def linear(value: float = 0.0, *, size: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, sgd(model)


def save_linear(folder: Path, step: int, *, size: int = 4, **more: Any) -> Path:
    model, optimizer = linear(float(step), size=size)
    return save(folder, Snapshot(step=step, model=model, optimizer=optimizer, **more))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
