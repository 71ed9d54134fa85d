"""BatchNorm and micro-batches: the validation loss of a small CNN, by how each step of 64 samples is cut.

    python bench/batchnorm.py                   the table: plain PyTorch, cut in several ways, and Potluck alone
    potluck host bench/batchnorm.py -- --out f  one training as it was started; its validation loss into a file

The images are gratings in noise; the class is the direction and the contrast, so that a layer which divides by the
deviation of too few samples loses what tells the classes apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import potluck

SAMPLES, BATCH, STEPS, RATE = 4096, 64, 50, 0.03
CONTRASTS = (0.3, 0.6, 1.2)
NOISE = 0.4
CUTS = {
    "64, plain": [64],
    "32": [32] * 2,
    "16": [16] * 4,
    "8": [8] * 8,
    "4": [4] * 16,
    "2": [2] * 32,
    "1": [1] * 64,
    "48 + 16": [48, 16],
    "56 + 8": [56, 8],
    "62 + 2": [62, 2],
    "32 + 2 × 16": [32] + [16] * 2,
    "32 + 4 × 8": [32] + [8] * 4,
    "32 + 8 × 4": [32] + [4] * 8,
    "48 + 8 × 2": [48] + [2] * 8,
}
"""How a step is cut. Behind a plus: on guests, whose running statistics are not the run's."""


class Gratings:
    """Images (1, 8, 8) of three directions in three contrasts, from a fixed seed."""

    def __init__(self, count: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 9, (count,), generator=chance)
        angle = (self.labels % 3 * math.pi / 3)[:, None, None]
        contrast = torch.tensor(CONTRASTS)[self.labels // 3][:, None, None]
        phase = torch.rand(count, 1, 1, generator=chance) * 2 * math.pi
        place = torch.arange(8.0)
        wave = torch.cos(angle) * place[:, None] + torch.sin(angle) * place[None, :]
        noise = NOISE * torch.randn(count, 8, 8, generator=chance)
        self.images = (contrast * torch.sin(1.6 * wave + phase) + noise)[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def build(seed: int, width: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number, channels in enumerate((1, width, width, width)):
        stride = 2 if number == 1 else 1
        convolution = nn.Conv2d(channels, width, 3, padding=1, stride=stride, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 9))


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    return optimizer, LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))


def validation_loss(model: nn.Module) -> float:
    model.eval()
    held_out = Gratings(1000, seed=1)
    with torch.no_grad():
        return float(F.cross_entropy(model(held_out.images), held_out.labels))


def plain(seed: int, cut: Sequence[int] = (BATCH,), steps: int = STEPS) -> float:
    """A training without a line of Potluck, on the samples that a run with this seed has."""
    data, model = Gratings(SAMPLES, seed=0), build(seed)
    optimizer, scheduler = make_optimizer(model, steps)
    epochs = -(-steps * BATCH // SAMPLES)
    chances = [np.random.Generator(np.random.PCG64([seed, epoch])) for epoch in range(epochs)]
    order = np.concatenate([chance.permutation(SAMPLES) for chance in chances])
    for step in range(steps):
        optimizer.zero_grad()
        chosen = torch.from_numpy(order[step * BATCH : (step + 1) * BATCH])
        for number, part in enumerate(torch.split(chosen, list(cut))):
            kept = [b.clone() for b in model.buffers()]
            loss = F.cross_entropy(model(data.images[part]), data.labels[part])
            (loss * len(part) / BATCH).backward()
            if number and cut[0] != cut[-1]:
                for buffer, before in zip(model.buffers(), kept):
                    buffer.copy_(before)
        optimizer.step()
        scheduler.step()
    return validation_loss(model)


def train(seed: int, steps: int = STEPS) -> float:
    """The same with Potluck: alone, as host or as guest, as this process was started."""
    run = potluck.start()
    model = build(seed).to(run.device)
    optimizer, scheduler = make_optimizer(model, steps)
    data = Gratings(SAMPLES, seed=0)
    keywords = {"steps": steps, "scheduler": scheduler, "seed": seed}
    for step in run.steps(model, optimizer, data, global_batch=BATCH, **keywords):
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels))
    return validation_loss(model.cpu())


def table(seeds: int) -> None:
    def row(name: str, micro_batches: int, losses: list[float]) -> None:
        spread = statistics.stdev(losses)
        mean = f"{BATCH / micro_batches:.1f}" if micro_batches else ""
        print(f"| {name} | {mean} | {statistics.mean(losses):.3f} ± {spread:.3f} |", flush=True)

    print("| a step of 64 in | on average | validation loss |\n|---|---|---|")
    for name, cut in CUTS.items():
        row(name, len(cut), [plain(seed, cut) for seed in range(seeds)])
    row("Potluck alone, automatic", 0, [train(seed) for seed in range(seeds)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="train once, with Potluck, and write the validation loss here")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    if chosen.out is None:
        os.environ["POTLUCK_THREADS"] = "1"  # as many as the plain loop has
        torch.set_num_threads(1)
        table(chosen.seeds)
    else:
        chosen.out.write_text(json.dumps(train(0, chosen.steps)))


if __name__ == "__main__":
    main()
