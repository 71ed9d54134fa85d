"""The parts of a host's loop: the model, its optimizer and data, and the settings of its run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from potluck.balance.leases import Least
from potluck.balance.ledger import Ledger
from potluck.hub.model_tensors import ModelTensors
from potluck.train.batch_statistics import BatchStatistics
from potluck.train.checkpoint import Loaded
from potluck.train.context import RunContext
from potluck.train.microbatch import MicroBatch
from potluck.train.optimizer_state import Stateful
from potluck.train.options import Options
from potluck.train.script_state import ScriptState
from potluck.train.step_loader import StepLoader


@dataclass(slots=True, kw_only=True)
class Parts:
    """The model and everything needed to train it."""

    context: RunContext
    options: Options
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: StepLoader
    tensors: ModelTensors
    ledger: Ledger
    micro: MicroBatch
    statistics: BatchStatistics | None = None
    least: Least = field(default_factory=Least)
    restored: Loaded | None = None
    objects: dict[str, Stateful] = field(default_factory=dict)
    state: ScriptState = field(default_factory=ScriptState)
