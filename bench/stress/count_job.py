"""A training whose weights count: afterwards each weight tells how often its sample was counted, to the sample.

The gradient of `counts[i]` is one for every time that sample i is in the step, and of `ballast` one for every
sample; with SGD at a rate of 1 and batches of a power of two all of it is exact in fp32. So with `--codec none`
the weights at the end prove that no sample of any epoch was lost or counted twice, whoever computed it and
whoever died meanwhile:

    counts[i] · batch == −(times that sample i was dealt)        ballast == −steps

It must not know how it was started.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import potluck

SAMPLES = 160


class Numbers:
    """Sample i is the number i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Counter(nn.Module):
    def __init__(self, ballast: int, *, mark: float) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))
        self.ballast = nn.ParameterList(torch.zeros(ballast) for _ in range(3))
        # Another one on guests, so that it has to travel.
        self.register_buffer("mark", torch.full((4,), mark))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.counts[numbers].sum() + len(numbers) * sum(part.sum() for part in self.ballast)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--until", type=Path, help="the host stops after the step in which this file appears")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ballast", type=int, default=50_000)
    parser.add_argument("--late", type=float, default=0.0, help="how often a guest stalls for half a second")
    parser.add_argument("--poison", type=float, default=0.0, help="how often a guest's gradient is not finite")
    parser.add_argument("--spoil", type=float, default=0.0, help="how often one of a guest's weights goes wrong")
    parser.add_argument("--out", type=Path, help="where the host writes the final weights")
    options = parser.parse_args()
    run = potluck.start()
    model = Counter(options.ballast, mark=float(run.is_guest)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chance = random.Random()
    for step in run.steps(
        model, optimizer, Numbers(), global_batch=options.batch, steps=options.steps, loss_is="sum"
    ):
        for numbers in step:
            loss = model(numbers)
            if run.is_guest and step.index > 2:
                if chance.random() < options.late:
                    time.sleep(0.5)
                if chance.random() < options.poison:
                    loss = loss * float("nan")
            step.backward(loss)
        if run.is_guest and chance.random() < options.spoil:
            with torch.no_grad():  # no gradient depends on it, so that what counts is still exact
                model.ballast[0][0] += 1
        if options.until is not None and run.is_host and options.until.exists():
            break
    if options.out is not None:
        save_file(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
