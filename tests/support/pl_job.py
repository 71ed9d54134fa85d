"""A Lightning training of a tiny model on made-up points, as a person writes it; a script and a module.

python pl_job.py [--steps N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import potluck.integrations.lightning  # noqa: F401

SAMPLES, BATCH = 44, 8
"""The last step of an epoch has 4 samples."""


def loader(count: int = SAMPLES, *, batch: int = BATCH, shuffle: bool = True, **more: Any) -> DataLoader[Any]:
    points = torch.randn(count, 6, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(points, points.square().sum(dim=1))
    return DataLoader(data, batch, shuffle=shuffle, generator=seeded(), **more)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.losses: list[float] = []

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        points, wanted = batch
        return F.mse_loss(self.layers(points).squeeze(1), wanted)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, *ignored: Any) -> None:
        self.losses.append(round(float(outputs["loss"]), 4))

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(out: Path, **changed: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 50,
        "gradient_clip_val": 0.5,
        "default_root_dir": out,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": "potluck",
    }
    return pl.Trainer(**{**given, **changed})


def fitted(out: Path, *, batches: Any = None, ckpt_path: Any = None, **changed: Any) -> pl.Trainer:
    """A trainer that has trained."""
    made = trainer(out, **changed)
    made.fit(Net(), batches or loader(), loader(shuffle=False), ckpt_path=ckpt_path)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    print("ready", flush=True)  # for a test that waits until everything is imported
    fitted(Path("out"), max_steps=asked.steps)
