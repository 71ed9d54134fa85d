"""The training of examples/plain_cnn.py on every machine you own. Ten lines differ.

Alone, as before: python examples/cnn.py [--epochs N] [--out best.pt]
With guests: potluck host examples/cnn.py, which prints the line to type on the other machines.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import potluck

SIDE, KINDS = 16, 4


class Figures(Dataset[tuple[Tensor, int]]):
    """Grey images of a cross, a ring, a square or stripes in noise. `augment`: shifted and mirrored at random."""

    def __init__(self, count: int, *, seed: int, augment: bool) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = (torch.arange(count) % KINDS).tolist()
        self.images = 0.8 * torch.randn(count, 1, SIDE, SIDE, generator=random)
        self.images += torch.stack([self.figure(kind) for kind in self.labels])
        self.augment = augment

    @staticmethod
    def figure(kind: int) -> Tensor:
        away = torch.arange(SIDE) - SIDE // 2
        x, y = torch.meshgrid(away, away, indexing="ij")
        shapes = [
            (x.abs() < 2) | (y.abs() < 2),
            (x.square() + y.square() - 25).abs() < 9,
            (x.abs() < 4) & (y.abs() < 4),
            x % 4 < 2,
        ]
        return shapes[kind].float().unsqueeze(0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment:
            right, down = (int(n) for n in torch.randint(-2, 3, (2,)))
            image = image.roll((right, down), dims=(1, 2))
            image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image, self.labels[index]


class Block(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.around(x))


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Block(1, 16), Block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, KINDS))


@torch.no_grad()
def share_right(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], device: torch.device) -> float:
    model.eval()
    right = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def keep_better(model: nn.Module, right: float, best: float) -> float:
    """Save the model if it is better than the best so far; the better of both."""
    print(f"right: {right:.1%}", flush=True)
    if right > best:
        torch.save(model.state_dict(), asked.out)
    return max(right, best)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--out", type=Path, default=Path("best.pt"))
asked = parser.parse_args()

loader = DataLoader(Figures(2000, seed=1, augment=True), batch_size=100, shuffle=True)
validation = DataLoader(Figures(400, seed=2, augment=False), batch_size=200)
run = potluck.start()
device = run.device
model = build().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=asked.epochs * len(loader))

run.state["best"] = 0.0
for step in run.steps(model, optimizer, loader, epochs=asked.epochs, clip_norm=1.0, scheduler=scheduler):
    for images, labels in step:
        step.backward(F.cross_entropy(model(images), labels))
    if not step.ends_epoch:
        continue
    right = share_right(model, validation, device)
    run.state["best"] = keep_better(model, right, run.state["best"])
