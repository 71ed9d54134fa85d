"""torchdata's StatefulDataLoader in `run.steps`: a resumed run goes on at exactly the next sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from potluck.device import pick
from potluck.spec.config import RunConfig
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder
from potluck.train.run import Run

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES, BATCH, EPOCHS = 22, 4, 2


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    """Each worker has its own part of the numbers. `read`: how many were read in this process."""

    def __init__(self) -> None:
        self.at = self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, apart = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while first + self.at * apart < SAMPLES:
            number = first + self.at * apart
            self.at += 1
            self.read += 1
            yield torch.tensor([float(number)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def samples(folder: Path, loader: Any, *, steps: int | None = None, resume: bool = False) -> list[list[float]]:
    """What each step had, up to the step after which the loop is left; the run's folder has a checkpoint then."""
    folder.mkdir(exist_ok=True)
    found = RunFolder(folder)
    context = RunContext(
        role=ALONE,
        config=RunConfig(checkpoint_every=0, micro_batch=BATCH),
        device=pick("cpu", threads=1),
        name="here",
        log=EventLog(found.events),
        folder=found,
        resume=resume,
    )
    model, taken = nn.Linear(1, 1), []
    run = Run(context)
    for step in run.steps(model, torch.optim.SGD(model.parameters(), 1e-4), loader, epochs=EPOCHS):
        for batch in step:
            taken.append(batch.flatten().tolist())
            step.backward(model(batch).mean())
        if len(taken) == steps:
            break
    context.loop.finish()
    return taken


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_it_goes_on_at_the_next_sample(kind: str, workers: int, tmp_path: Path) -> None:
    def loader() -> Any:
        if kind == "stream":
            return stateful.StatefulDataLoader(Stream(), BATCH, num_workers=workers)
        generator = torch.Generator().manual_seed(5)
        return stateful.StatefulDataLoader(Numbers(), BATCH, shuffle=True, generator=generator, num_workers=workers)

    whole = samples(tmp_path / "whole", loader())
    assert whole == [batch.flatten().tolist() for batch in epochs_of(loader())]
    assert sorted(number for batch in whole for number in batch) == sorted([*map(float, range(SAMPLES))] * EPOCHS)
    for stop in (3, len(whole) // EPOCHS):  # within an epoch, and at its end
        folder = tmp_path / f"stopped after {stop}"
        assert samples(folder, loader(), steps=stop) == whole[:stop]
        assert samples(folder, loader(), resume=True) == whole[stop:]


def epochs_of(loader: Any) -> Iterator[Tensor]:
    for _ in range(EPOCHS):
        yield from loader


def test_a_stream_is_not_read_again(tmp_path: Path) -> None:
    samples(tmp_path, stateful.StatefulDataLoader(Stream(), BATCH), steps=3)
    stream = Stream()
    samples(tmp_path, stateful.StatefulDataLoader(stream, BATCH), resume=True)
    assert stream.read == EPOCHS * SAMPLES - 3 * BATCH
