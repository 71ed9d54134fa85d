"""How the loop gets at its samples: data sets and functions that make them, and the order of an epoch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from potluck.device.cpu import CpuDevice
from potluck.errors import DataError
from potluck.train.data import Loader, cloned, epoch_order, to_device
from potluck.train.step_loader import DataSetLoader
from support.fake_device import FakeDevice


class Squares:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


class Callable5(Squares):
    """A data set that can be called for something else is still a data set."""

    def __call__(self) -> None:
        raise AssertionError("this was not to be called")


@pytest.mark.parametrize("dataset", [Squares(), Squares, lambda: Squares(), Callable5(), [0, 1, 4, 9, 16]])
def test_a_data_set_or_what_makes_one(dataset: Any) -> None:
    loader = Loader(dataset, None)
    assert loader.samples == 5
    assert loader.fetch([3, 1]).tolist() == [9, 1]


class Endless(IterableDataset[int]):
    """An iterable data set, which torch gives a __getitem__ that raises."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Unmeasured:
    def __getitem__(self, index: int) -> int:
        return index


class Immeasurable(Unmeasured):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("dataset", "what", "hint"),
    [
        (lambda: iter([1, 2]), "of type list_iterator, which can only be read from its start", "map-style"),
        (7, "of type int, which cannot be indexed", "map-style"),
        (Endless(), "of type Endless, which can only be read from its start", "map-style"),
        (Unmeasured(), "of type Unmeasured, which has no length", "__len__"),
        (Immeasurable(), "of type Immeasurable, which has no length", "__len__"),
    ],
)
def test_what_cannot_be_dealt_is_named_with_what_to_give(dataset: Any, what: str, hint: str) -> None:
    with pytest.raises(DataError, match=what) as error:
        Loader(dataset, None)
    assert hint in error.value.hint


def test_an_epoch_has_every_sample_once_and_depends_on_seed_and_number_only() -> None:
    order: Callable[[int], Any] = epoch_order(100, seed=3)
    assert sorted(order(0)) == list(range(100))
    assert list(order(1)) == list(epoch_order(100, seed=3)(1))
    assert list(order(0)) != list(order(1))
    assert list(order(0)) != list(epoch_order(100, seed=4)(0))


def test_a_tensor_on_a_device_is_refused_and_named() -> None:
    labels = torch.zeros(2, device="meta")
    with pytest.raises(DataError, match="a batch of the loader has a tensor on meta") as error:
        to_device({"points": torch.zeros(2), "labels": labels}, CpuDevice())
    assert "leave samples and labels on the CPU" in error.value.hint


def test_mappings_go_to_the_device_and_stay_what_they_are() -> None:
    """The collators of Hugging Face return a mapping of their own, which is no dict."""
    batch = UserDict(points=torch.zeros(2), more={"labels": torch.zeros(2)})
    device = FakeDevice()
    moved = to_device(batch, device)
    assert type(moved) is UserDict
    assert [moved["points"].device, moved["more"]["labels"].device] == [device.torch_device] * 2
    assert [batch["points"].device, batch["more"]["labels"].device] == [torch.device("cpu")] * 2
    own = cloned(batch)
    own["points"] += 1
    assert batch["points"].tolist() == [0.0, 0.0]


def test_a_data_set_ends_with_the_step_that_has_its_last_epochs_last_sample() -> None:
    loader = DataSetLoader(Squares(), None, global_batch=3, seed=0, epochs=2)
    steps = []
    while (step := loader.next_step()) is not None:
        steps.append((step.epoch, loader.ends_epoch()))
    assert steps == [(0, False), (0, True), (1, False), (1, True)]
    assert loader.total_steps(None) == 4
    assert loader.total_steps(3) == 3
