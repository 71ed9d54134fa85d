"""Data that cannot be read: the sample is named, what was trained is saved, and Ctrl-C need not wait for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from potluck.env import Environment
from potluck.errors import DataError
from potluck.fleet.local import LocalGuests
from potluck.report.view import QuietView
from potluck.spec.config import RunConfig
from potluck.spec.events import RunEnded, RunEvent
from potluck.train.context import ALONE
from potluck.train.data import Loader
from potluck.train.ending import Interrupted
from potluck.train.run import Run
from potluck.train.run_specs import RunSpec
from potluck.train.session import Session
from potluck.train.torch_loader import TorchLoader, open_steps, reader_of

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


class Corrupt(Dataset[Any]):
    """Sample 17 cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise OSError("bad header\nin line 3")
        return torch.full((2,), float(index))


class CorruptTogether(Corrupt):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class OnlyTogether(CorruptTogether):
    """Each sample alone can be read."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 17 in indices:
            raise OSError("bad header")
        return [self[index] for index in indices]


class CorruptStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(24):
            yield Corrupt()[index]


class Hangs(Corrupt):
    """Sample 9 never comes; Ctrl-C does."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        return torch.full((2,), float(index))


def walk(loader: Any, at_once: int = 2) -> None:
    try:
        while (step := loader.next_step()) is not None:
            loader.ready()
            for first in range(step.first, step.first + step.count, at_once):
                loader.fetch(range(first, min(first + at_once, step.first + step.count)))
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (Corrupt(), "sample 17 of the data set cannot be read: OSError: bad header"),
        (CorruptTogether(), "sample 17 of the data set cannot be read: OSError: bad header"),
        (OnlyTogether(), "samples 16 to 23 of the data set cannot be read: OSError: bad header"),
        (CorruptStream(), "the stream fails after sample 16, in batch 3 of epoch 1: OSError: bad header"),
    ],
)
def test_a_sample_that_cannot_be_read_is_named(dataset: Any, what: str, workers: int) -> None:
    loader = TorchLoader(DataLoader(dataset, batch_size=8, num_workers=workers), epochs=1)
    with pytest.raises(DataError) as caught:
        walk(loader, at_once=8 if isinstance(dataset, OnlyTogether) else 2)
    assert str(caught.value) == what
    assert caught.value.__cause__ is not None  # where it happened


def test_a_data_set_without_a_loader_names_it_too() -> None:
    with pytest.raises(DataError, match="sample 17 of the data set cannot be read: OSError"):
        walk(open_steps(Corrupt(), global_batch=8))
    with pytest.raises(DataError, match="sample 17 of the data set cannot be read: OSError"):
        Loader(Corrupt()).fetch([3, 17])


def test_a_guest_that_reads_with_workers_names_it_too() -> None:
    reader, _ = reader_of(DataLoader(Corrupt(), batch_size=8, num_workers=1), None, None)
    try:
        with pytest.raises(DataError, match="sample 17 of the data set cannot be read: OSError"):
            reader.fetch([3, 17])
    finally:
        reader.close()


class Shows(Corrupt):
    """Its samples say which data set the worker's functions see."""

    name = ""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return {"type": type(info.dataset).__name__, "name": self.name}


def rename(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.name = "renamed"  # type: ignore[attr-defined]


def test_a_workers_functions_see_the_users_own_data_set() -> None:
    loader = TorchLoader(DataLoader(Shows(), batch_size=2, num_workers=1, worker_init_fn=rename), epochs=1)
    try:
        loader.next_step()
        loader.ready()
        assert loader.fetch([0, 1]) == {"type": ["Shows"] * 2, "name": ["renamed"] * 2}
    finally:
        loader.close()


# -- what worker processes cannot be given ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("where", ["transform", "worker_init_fn"])
def test_a_lambda_for_a_spawned_worker_is_told_in_one_sentence(method: str, where: str) -> None:
    data, keywords = Corrupt(), {}
    if where == "transform":
        data.transform = lambda sample: sample  # type: ignore[attr-defined]
    else:
        keywords["worker_init_fn"] = lambda worker: None
    loader = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context=method, **keywords)
    with pytest.raises(DataError, match="cannot be given its data set") as caught:
        walk(TorchLoader(loader, epochs=1))
    assert "a named function at module level" in caught.value.hint


def test_a_lambda_that_collates_needs_no_name() -> None:
    """Spawned worker processes are not sent it; forked ones have it already."""
    how: Any = {"collate_fn": lambda samples: samples, "num_workers": 1, "multiprocessing_context": "spawn"}
    loader = TorchLoader(DataLoader(Corrupt(), batch_size=8, **how))
    ForkingPickler.dumps(loader._loader.collate_fn)
    loader.close()


# -- in a run -----------------------------------------------------------------------------------------------


class Seen(QuietView):
    def __init__(self) -> None:
        self.ends: list[tuple[str, int]] = []

    def event(self, event: RunEvent) -> None:
        if isinstance(event, RunEnded):
            self.ends.append((event.reason, event.step))


def trained(runs: Path, loader: Any, **keywords: Any) -> tuple[Path, tuple[str, int], nn.Module]:
    """Train until the data fails; the checkpoints' folder, how it ended, and the model."""
    torch.manual_seed(0)
    view, model = Seen(), nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    spec = RunSpec(role=ALONE, config=RunConfig(device="cpu", checkpoint_every=0), what="job.py", runs=runs)
    with Session(spec, Environment(), view, guests=LocalGuests) as opened:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for step in Run(opened.context).steps(model, optimizer, loader, epochs=1, micro_batch=2, **keywords):
            for batch in step:
                step.backward(model(batch).mean())
    raise AssertionError("the data did not fail")


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Corrupt(), batch_size=8),
        DataLoader(Corrupt(), batch_size=8, num_workers=1),
        DataLoader(CorruptStream(), batch_size=8),
    ],
    ids=["here", "worker", "stream"],
)
def test_what_was_trained_before_is_saved(tmp_path: Path, loader: Any) -> None:
    with pytest.raises(DataError, match="bad header"):
        trained(tmp_path, loader)
    (saved,) = tmp_path.glob("*/checkpoints/step-*")
    assert saved.name == "step-00000002"


@posix
@pytest.mark.parametrize("keywords", [{}, {"global_batch": 8}], ids=["loader", "data set"])
def test_the_first_ctrl_c_stops_a_data_set_that_hangs(tmp_path: Path, keywords: dict[str, Any]) -> None:
    began, before = time.monotonic(), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Interrupted):
            trained(tmp_path, Hangs() if keywords else DataLoader(Hangs(), batch_size=8), **keywords)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 20
    assert list(tmp_path.glob("*/checkpoints/step-*"))
