"""A small training with random augmentation, as a user would write it: who draws the random numbers is an argument.

It must not know how it was started. SPOIL=opposite, twice or noise in a guest's environment spoils its gradients.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import potluck

SIDE, MARGIN, CLASSES, SAMPLES, BATCH = 16, 2, 4, 256, 16

OWN = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
"""Nobody can seed this alike on two machines."""


def offset(kind: str, most: int) -> int:
    """A random number from 0 to `most`."""
    if kind == "random":
        return random.randint(0, most)
    if kind == "numpy":
        return int(np.random.randint(0, most + 1))
    return int(torch.randint(0, most + 1, (), generator=OWN if kind == "own" else None))


def cropped(image: Tensor, kinds: Sequence[str]) -> Tensor:
    """[SIDE, SIDE], moved by up to MARGIN for each kind."""
    for kind in kinds:
        padded = F.pad(image, (MARGIN, MARGIN, MARGIN, MARGIN))
        down, right = offset(kind, 2 * MARGIN), offset(kind, 2 * MARGIN)
        image = padded[down : down + SIDE, right : right + SIDE]
    return image


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Blurred images with a label, cropped where they are read."""

    def __init__(self, kinds: Sequence[str]) -> None:
        numbers = torch.Generator().manual_seed(7)
        small = torch.randn(SAMPLES, 1, SIDE // 8, SIDE // 8, generator=numbers)
        self.images = F.interpolate(small, SIDE, mode="bilinear")[:, 0]
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=numbers)
        self.kinds = kinds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return cropped(self.images[index], self.kinds), self.labels[index]


def spoil(model: nn.Module, how: str) -> None:
    """From now on this machine's gradients are wrong."""
    changes = {
        "opposite": lambda gradient: -gradient,
        "twice": lambda gradient: 2 * gradient,
        "noise": lambda gradient: torch.randn(gradient.shape, generator=OWN) * gradient.std(),
    }
    for parameter in model.parameters():
        parameter.register_hook(changes[how])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True)
    kinds = ["random", "numpy", "torch", "own"]
    parser.add_argument("--read", nargs="*", default=[], choices=kinds, help="what crops draw from in __getitem__")
    parser.add_argument(
        "--body", nargs="*", default=[], choices=kinds, help="what they draw from in the loop's body"
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--data", default="sent")
    parser.add_argument("--workers", type=int, default=0, help="processes that read")
    options = parser.parse_args()
    run = potluck.start()
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(64, CLASSES)
    ).to(run.device)
    if run.is_guest and "SPOIL" in os.environ:
        spoil(model, os.environ["SPOIL"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Data(options.read), batch_size=BATCH, shuffle=True, num_workers=options.workers)
    for step in run.steps(model, optimizer, loader, data=options.data):
        for images, labels in step:
            images.mul_(1.5)  # in place, as augmentation often is
            images = torch.stack([cropped(image, options.body) for image in images])
            step.backward(F.cross_entropy(model(images), labels))
        if run.is_host and options.until.exists():
            break


if __name__ == "__main__":
    main()
