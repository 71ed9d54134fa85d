"""The job of bench/memory.py: a model that is nearly all parameters; notes its process's memory."""

import sys
from pathlib import Path

import psutil
import torch
from torch import nn

import potluck

WIDTH, LAYERS, STEPS = 2048, 12, 10

run = potluck.start()
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
out = Path(sys.argv[1]) / f"{run.role}.txt"
data = torch.utils.data.TensorDataset(torch.randn(256, WIDTH))
for step in run.steps(model, optimizer, data, global_batch=32, steps=STEPS, micro_batch=4):
    for (x,) in step:
        step.backward(model(x).square().mean())
        parameters = sum(p.numel() for p in model.parameters())
        out.write_text(f"{parameters} {psutil.Process().memory_info().rss}")
