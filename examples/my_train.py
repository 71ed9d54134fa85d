"""The loop of examples/plain.py on every machine you own. Apart from the import, five lines differ.

Alone, as before: python examples/my_train.py
With guests: potluck host examples/my_train.py
That prints the line to type on the other machines, `potluck join TOKEN`. They need neither this file nor the data.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import potluck


def spirals(samples: int) -> TensorDataset:
    """Points on the three arms of a spiral, each labelled with the number of its arm."""
    random = torch.Generator().manual_seed(1)
    arms = torch.arange(samples) % 3
    radius = torch.rand(samples, generator=random)
    angle = 5 * radius + arms * 2 * torch.pi / 3 + 0.2 * torch.randn(samples, generator=random)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arms)


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 3))


dataset = spirals(6000)
run = potluck.start()
model = build().to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

loader = DataLoader(dataset, batch_size=200, shuffle=True)
for step in run.steps(model, optimizer, loader, epochs=10, clip_norm=1.0):
    for points, labels in step:
        step.backward(F.cross_entropy(model(points), labels))

with torch.no_grad():
    points, labels = dataset.tensors
    guessed = model.cpu()(points).argmax(dim=1)
    print(f"right: {(guessed == labels).float().mean():.1%}")
