"""A plain PyTorch loop: python examples/plain.py

examples/my_train.py is the same training on every machine you own. Compare the two files side by side.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


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
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

loader = DataLoader(dataset, batch_size=200, shuffle=True)
for _epoch in range(10):
    for points, labels in loader:
        loss = F.cross_entropy(model(points.to(device)), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    points, labels = dataset.tensors
    guessed = model.cpu()(points).argmax(dim=1)
    print(f"right: {(guessed == labels).float().mean():.1%}")
