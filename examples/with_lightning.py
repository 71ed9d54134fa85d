"""The training of examples/plain_lightning.py on every machine you own. Two lines differ.

Alone, as before: python examples/with_lightning.py [--epochs N] [--out DIR]
With guests: potluck host examples/with_lightning.py, which prints the line to type on the other machines.
"""

import argparse

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import potluck.integrations.lightning  # noqa: F401

Batch = list[Tensor]


class Spirals(LightningDataModule):
    """Points on the three arms of a spiral, each labelled with the number of its arm."""

    def setup(self, stage: str) -> None:
        random = torch.Generator().manual_seed(1)
        arms = torch.arange(4000) % 3
        radius = torch.rand(4000, generator=random)
        angle = 5 * radius + arms * 2 * torch.pi / 3 + 0.2 * torch.randn(4000, generator=random)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.parts = random_split(TensorDataset(points, arms), [3600, 400], random)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.parts[0], batch_size=200, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.parts[1], batch_size=400)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 3))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        points, arms = batch
        return F.cross_entropy(self.layers(points), arms)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        points, arms = batch
        self.log("right", (self.layers(points).argmax(1) == arms).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", default="lightning")
asked = parser.parse_args()

torch.manual_seed(1)
best = ModelCheckpoint(asked.out, monitor="right", mode="max")
trainer = Trainer(
    strategy="potluck",
    devices=1,
    max_epochs=asked.epochs,
    gradient_clip_val=1.0,
    callbacks=[best],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), datamodule=Spirals())
print(f"right: {float(best.best_model_score or 0):.1%}")
