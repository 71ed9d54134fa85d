"""A training with a DataLoader and worker processes, as a user would write it: what tests of whole runs run.

The last batch of an epoch is smaller, the order is random, and reading draws random numbers that nothing uses.
Where samples are `wide`, most of their values are not used either: they are large, and travel ahead of their lease.
Other kinds of loaders: a batch sampler of the user's whose batches differ in size, with a collate function that
returns a mapping; and a stream without a length or a state.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import UserDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import potluck

SAMPLES, BATCH, FEATURES = 72, 16, 24


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Points with a number. With `marks`, whoever reads one leaves a file named for its role and process there."""

    def __init__(self, marks: Path | None = None, role: str = "", wide: int = FEATURES) -> None:
        self._marks, self._role, self._wide = marks, role, wide

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._marks is not None and self._role:
            (self._marks / f"{self._role}-{os.getpid()}").touch()
        torch.rand(1)
        point = torch.sin(torch.arange(FEATURES) * (index + 1.0))
        return F.pad(point, (0, self._wide - FEATURES)), point.sum()


class Grouped:
    """Batches of unlike sizes, in an order that depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        numbers = random.Random(self.epoch)
        left = numbers.sample(range(SAMPLES), SAMPLES)
        while left:
            size = numbers.randint(4, BATCH)
            yield left[:size]
            left = left[size:]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Each worker has its part of it."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, by = (info.id, info.num_workers) if info is not None else (0, 1)
        return (self._data[index] for index in range(first, SAMPLES, by))


def mapping(samples: list[tuple[Tensor, Tensor]]) -> UserDict[str, Tensor]:
    points, targets = zip(*samples, strict=True)
    by_worker = get_worker_info() is not None
    return UserDict(points=torch.stack(points), targets=torch.stack(targets), by_worker=by_worker)


def loader(data: Data, workers: int, kind: str = "") -> DataLoader[Any]:
    if kind == "grouped":
        return DataLoader(data, batch_sampler=Grouped(), collate_fn=mapping, num_workers=workers)  # type: ignore[arg-type]
    if kind == "stream":
        return DataLoader(Stream(data), batch_size=BATCH, num_workers=workers)
    order = torch.Generator().manual_seed(17)
    persist = workers > 0
    return DataLoader(
        data, batch_size=BATCH, shuffle=True, generator=order, num_workers=workers, persistent_workers=persist
    )


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    points, targets = (batch["points"], batch["targets"]) if isinstance(batch, dict | UserDict) else batch
    return F.mse_loss(model(points[:, :FEATURES])[:, 0], targets)


def trained_by_hand(epochs: int, workers: int = 2, kind: str = "") -> tuple[dict[str, Tensor], list[float]]:
    """The same training without a line of potluck, and each step's loss."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = loader(Data(), workers, kind)
    losses = []
    for epoch in range(epochs):
        if isinstance(batches.batch_sampler, Grouped):
            batches.batch_sampler.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict(), losses


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--kind", default="", help="of the loader: grouped or stream")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--wide", type=int, default=FEATURES, help="values of a sample")
    parser.add_argument("--data", default="sent")
    parser.add_argument("--marks", type=Path, help="a folder: who read samples, or collated batches (grouped)")
    parser.add_argument("--fails-at", type=int, help="the script fails in this step")
    parser.add_argument("--out", type=Path, help="where the host writes the final weights")
    options = parser.parse_args(words)
    run = potluck.start()
    model = build().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reads = "" if options.kind == "grouped" else run.role
    batches = loader(Data(options.marks, reads, options.wide), options.workers, options.kind)
    for step in run.steps(model, optimizer, batches, epochs=options.epochs, data=options.data):
        for batch in step:
            step.backward(loss_of(model, batch))
            if options.marks is not None and options.kind == "grouped":
                (options.marks / f"{run.role}-{'worker' if batch['by_worker'] else 'itself'}-{step.index}").touch()
            if run.is_host and step.index == options.fails_at:
                raise ValueError("as it was asked to")
    if options.out is not None:
        save_file(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
