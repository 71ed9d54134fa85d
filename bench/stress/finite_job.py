"""A small training in which numbers go wrong at will: on the host, on the guests, or on both.

In the steps from `--first` on, `--steps-bad` of them, the loss is multiplied with what `--what` says before its
backward, and the points too where that is not finite. It must not know how it was started, nor what should follow.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import potluck

SAMPLES, WIDTH = 96, 24
FACTORS = {"nan": math.nan, "inf": math.inf, "huge": 1e30, "limit": 3e38}


class Points:
    """Points of a plane and what a wave has there."""

    def __init__(self) -> None:
        self.points = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], torch.sin(3 * self.points[index]).sum()


class Centred(nn.Module):
    """Keeps a running mean, as batch norm does, of which a single bad batch would be enough to make NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, points: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(points.mean(0), 0.1)
        return points - self.mean


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--where", choices=["host", "guests", "both"], required=True)
    parser.add_argument("--what", choices=list(FACTORS), required=True)
    parser.add_argument("--first", type=int, required=True, help="counted from 1")
    parser.add_argument("--steps-bad", type=int, default=1)
    parser.add_argument("--clip", type=float)
    options = parser.parse_args()
    run = potluck.start()
    torch.manual_seed(3)
    model = nn.Sequential(Centred(), nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bad = range(options.first, options.first + options.steps_bad)
    here = options.where in ("both", "guests" if run.is_guest else "host")
    for step in run.steps(
        model, optimizer, Points(), global_batch=options.batch, steps=options.steps, clip_norm=options.clip
    ):
        factor = FACTORS[options.what] if here and step.index + 1 in bad else 1.0
        for points, values in step:
            points = points if math.isfinite(factor) else points * factor
            loss = (model(points).squeeze(1) - values).square().mean() + 1.0
            step.backward(loss * factor)


if __name__ == "__main__":
    main()
