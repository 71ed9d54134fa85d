"""A small training on sentences of unequal lengths, whose loss is a mean over tokens: what `items=` is tested with.

It owns a model, a data set and a loop, and writes the final weights; it must not know how it was started.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import potluck

WORDS, LONGEST, SAMPLES, BATCH = 40, 16, 300, 24
NOT_COUNTED = -100


class Sentences:
    """Tokens and labels, padded. Lengths are from 0 (nothing to learn from) to 16."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(WORDS, (SAMPLES, LONGEST), generator=numbers)
        lengths = torch.randint(LONGEST + 1, (SAMPLES, 1), generator=numbers)
        lengths[::4] = 0
        counted = torch.arange(LONGEST) < lengths
        self.labels = torch.where(counted, (7 * self.tokens + 3) % WORDS, NOT_COUNTED)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.labels[index]


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, 24), nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, WORDS))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def mean_over_tokens(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The loss, NaN where no token counts, and how many count."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED)
    return loss, int((labels != NOT_COUNTED).sum())


def trained_by_hand(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """The same training without a line of potluck: one process, whole batches; and each step's loss."""
    data, model = Sentences(), build()
    optimizer = make_optimizer(model)
    epochs = range(-(-steps * BATCH // SAMPLES))
    order = [i for epoch in epochs for i in np.random.Generator(np.random.PCG64([0, epoch])).permutation(SAMPLES)]
    losses = []
    for step in range(steps):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        loss, _ = mean_over_tokens(model, data.tokens[chosen], data.labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, help="the host stops after the step in which this file appears")
    parser.add_argument("--out", type=Path, help="where the host writes the final weights")
    options = parser.parse_args(words)
    run = potluck.start()
    model = build().to(run.device)
    for step in run.steps(model, make_optimizer(model), Sentences, global_batch=BATCH):
        for tokens, labels in step:
            loss, items = mean_over_tokens(model, tokens, labels)
            step.backward(loss, items=items)
        if run.is_host and options.until.exists():
            break
    if run.is_host:
        save_file(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
