"""A net of sines that learns a picture: at weights rounded to int4 its gradient is quite another one.

Trains until the file that it is given exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck

BATCH = 16


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


run = potluck.start()
torch.manual_seed(0)
model = nn.Sequential(*(m for size in (2, 64, 64, 64) for m in (nn.Linear(size, 64), Sine())), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
places = torch.rand(512, 2) * 2 - 1
values = torch.sin(5 * places[:, :1]) * torch.cos(7 * places[:, 1:])
for step in run.steps(model, optimizer, list(zip(places, values)), global_batch=BATCH, seed=0):
    for place, value in step:
        step.backward(F.mse_loss(model(place), value))
    if run.is_host and Path(sys.argv[1]).exists():
        break
