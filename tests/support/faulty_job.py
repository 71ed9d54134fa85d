"""A small training on machines that go wrong, each as its own environment says.

It must not know how it was started. SPOIL=weights@N: this guest changes one of its weights, once, after step N;
SPOIL=gradients@N: from step N on its gradients point elsewhere.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import potluck

FEATURES, CLASSES, SAMPLES = 16, 4, 256


class Data:
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.points = torch.randn(SAMPLES, FEATURES, generator=numbers)
        self.labels = (self.points @ torch.randn(FEATURES, CLASSES, generator=numbers)).argmax(dim=1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=24)
    options = parser.parse_args()
    what, _, after = os.environ.get("SPOIL", "nothing@0").partition("@")
    run = potluck.start()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, CLASSES))
    model.to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spoilt = not run.is_guest
    for step in run.steps(model, optimizer, Data, global_batch=options.batch):
        for points, labels in step:
            loss = F.cross_entropy(model(points), labels)
            if what == "gradients" and run.is_guest and step.index >= int(after):
                loss = loss + model(points).square().mean()
            step.backward(loss)
        if what == "weights" and not spoilt and step.index >= int(after):
            spoilt = True
            model[0].weight.data[0, 0] += 1e-6  # unseen by torch, as a fault of memory is
        if run.is_host and options.until.exists():
            break


if __name__ == "__main__":
    main()
