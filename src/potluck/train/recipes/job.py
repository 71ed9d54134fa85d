"""Trains a recipe with the same public loop that users write.

It runs unchanged alone, as host and as guest.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from potluck.train.recipes import Recipe
from potluck.train.run import start


def train(recipe: Recipe, config: Any) -> nn.Module:
    """Train the recipe to its end; the trained model (on a guest this does not return)."""
    run = start()
    model = recipe.model(config).to(run.device)
    recipe.compile(model, config, run.device, guest=run.is_guest)
    optimizer = recipe.optimizer(model, config)
    steps = run.steps(
        model,
        optimizer,
        lambda: recipe.dataset(config),
        global_batch=config.global_batch,
        steps=config.steps,
        clip_norm=config.clip_norm or None,
        scheduler=recipe.scheduler(optimizer, config),
        seed=config.seed,
        tokens_per_sample=recipe.tokens_per_sample(config),
    )
    for step in steps:
        for batch in step:
            step.backward(recipe.loss(model, batch, config))
    return model
