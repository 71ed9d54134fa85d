"""Owns the list of recipes: named trainings that need no script.

Imports torch only when a recipe is requested.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from potluck.checked import did_you_mean
from potluck.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

__all__ = ["NAMES", "Recipe", "RecipeConfig", "get"]

NAMES = ("gpt", "cnn")


class RecipeConfig(Protocol):
    """The fields that every recipe's frozen Config has besides its own. All fields are JSON scalars or None."""

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""

    @property
    def global_batch(self) -> int:
        """Samples per step, over all machines."""

    @property
    def clip_norm(self) -> float:
        """Largest norm of the gradient, which is scaled down to it; 0: no limit."""

    @property
    def seed(self) -> int:
        """Random seed for the weights and the sample order."""

    @property
    def data(self) -> str | None:
        """Path of the samples; None: they need no file."""


class Recipe(Protocol):
    """Everything a run needs. `config` is always an instance of the recipe's own Config."""

    @property
    def name(self) -> str:
        """The recipe's name on the command line."""

    @property
    def Config(self) -> type[Any]:
        """A frozen, keyword-only struct (RecipeConfig), each field documented below itself."""

    def model(self, config: Any) -> nn.Module:
        """The initial model on the CPU: the same for the same config on every machine, without any data."""

    def compile(self, model: nn.Module, config: Any, device: torch.device, *, guest: bool) -> None:
        """Compile a model that is on its device, if that is worth it."""

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        """An optimizer over the model's trained parameters."""

    def scheduler(self, optimizer: torch.optim.Optimizer, config: Any) -> LRScheduler | None:
        """The learning-rate scheduler, stepped once after every step."""

    def dataset(self, config: Any) -> Dataset[Any]:
        """The samples, map-style, with `__getitems__` (a list of samples). Only the host calls it."""

    def loss(self, model: nn.Module, batch: Any, config: Any) -> Tensor:
        """The mean over the samples of a batch (samples stacked, on the model's device)."""

    def tokens_per_sample(self, config: Any) -> int | None:
        """Tokens per sample; None if that is no useful measure."""

    def validation(self, model: nn.Module, config: Any, device: torch.device) -> float | None:
        """How good the model is on samples it was not trained on. Only the host calls it."""

    def finish(self, model: nn.Module, config: Any, device: torch.device) -> str:
        """Text to show at the end. Only the host calls it."""


def get(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        hint = f"your own script is trained by: potluck host {name}; " if name.endswith(".py") else hint
        raise ConfigError(f"there is no recipe {name!r}", hint=f"{hint}recipes: {', '.join(NAMES)}")
    recipe: Recipe = importlib.import_module(f"potluck.train.recipes.{name}").RECIPE
    return recipe
