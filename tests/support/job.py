"""A small training as a user would write it, steered by its arguments: what the tests of whole runs run.

It owns a model, a data set and a loop, and writes the final weights; it must not know how it was started.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import potluck

FEATURES, CLASSES, SAMPLES = 32, 10, 600


class Data:
    """Points with a label, from a fixed seed."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.points = torch.randn(SAMPLES, FEATURES, generator=numbers)
        rule = torch.randn(FEATURES, CLASSES, generator=numbers)
        self.labels = (self.points @ rule).argmax(dim=1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def build(width: int, dropout: float = 0.0) -> nn.Module:
    """Some 150 thousand parameters at width 256: several pieces, and more layers than pieces."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Dropout(dropout),
        nn.Tanh(),
        nn.Linear(width, CLASSES),
    )


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))


def order_of(epoch: int) -> list[int]:
    """The samples' order as the docs promise it: a permutation from the seed (0) and the epoch's number."""
    return list(np.random.Generator(np.random.PCG64([0, epoch])).permutation(SAMPLES))


def trained_by_hand(steps: int, batch: int, clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """The same training without a line of potluck: whole batches, torch's own update; and each step's loss."""
    data, model = Data(), build(256)
    optimizer, scheduler = make_optimizer(model)
    epochs = -(-steps * batch // SAMPLES)
    samples = [index for epoch in range(epochs) for index in order_of(epoch)]
    losses = []
    for step in range(steps):
        chosen = samples[step * batch : (step + 1) * batch]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.points[chosen]), data.labels[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--until", type=Path, help="the host stops after the step in which this file appears")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--jitter", type=float, default=0.0, help="guests stall so long now and then, in seconds")
    parser.add_argument("--data", default="sent")
    parser.add_argument("--marks", type=Path, help="a folder: whoever opens the data set leaves a file there")
    parser.add_argument("--out", type=Path, help="where the host writes the final weights")
    options = parser.parse_args(words)
    run = potluck.start()

    def open_data() -> Data:
        if options.marks is not None:
            (options.marks / run.role).touch()
        return Data()

    model = build(options.width, options.dropout).to(run.device)
    optimizer, scheduler = make_optimizer(model)
    for step in run.steps(
        model,
        optimizer,
        open_data,
        global_batch=options.batch,
        steps=options.steps,
        clip_norm=options.clip,
        scheduler=scheduler,
        data=options.data,
    ):
        for points, labels in step:
            loss = F.cross_entropy(model(points), labels)
            if run.is_guest and options.jitter:
                time.sleep(random.expovariate(1 / options.jitter))
            step.backward(loss)
        if options.until is not None and run.is_host and options.until.exists():
            break
    if options.out is not None:
        save_file(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
