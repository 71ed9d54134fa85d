"""Reads samples in this process: the data set that a script gave, its order, and batches on the device.

Owns access to the data set (one thread at a time).
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from potluck.device import Device
from potluck.errors import DataError, PotluckError
from potluck.train.packing import Collate, Unread, collated, in_words


def epoch_order(samples: int, seed: int) -> Callable[[int], Sequence[int]]:
    """For each epoch a permutation that depends on nothing but the seed and the epoch's number."""

    def order(epoch: int) -> Sequence[int]:
        return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)  # type: ignore[return-value]

    return order


def makes_data(given: Any) -> bool:
    """Whether it is a function that returns a data set or a loader."""
    # A class is a function that returns a data set, though it has the data set's attributes.
    return isinstance(given, type) or (callable(given) and not hasattr(given, "__getitem__"))


def opened(given: Any) -> Any:
    """The data set or the loader, also if a function that makes one was given."""
    return given() if makes_data(given) else given


class Loader:
    """Reads samples by their indices, in this process; several threads share it, one at a time."""

    def __init__(self, dataset: Any, collate: Collate | None = None, *, sized: bool = True) -> None:
        """`sized`: refuse a data set without a length."""
        self.dataset = opened(dataset)
        self._collate = collate or default_collate
        self._lock = threading.Lock()
        if sized:
            length(self.dataset)

    @property
    def samples(self) -> int:
        return length(self.dataset)

    def expect(self, batches: Sequence[Sequence[Any]]) -> None:
        """Announce the batches that will be fetched next, in this order, if they are needed."""

    def fetch(self, keys: Sequence[Any]) -> Any:
        """The batch of these samples, on the CPU."""
        with self._lock:
            return collated(read(self.dataset, list(keys)), self._collate, keys)

    def close(self) -> None:
        """Does nothing: there is nothing to end in this process."""


def read(dataset: Any, keys: list[Any]) -> list[Any]:
    """The samples of these indices. An error names the sample that cannot be read."""
    if callable(getattr(dataset, "__getitems__", None)):
        try:
            return list(dataset.__getitems__(keys))
        except Exception as error:
            for key in keys:
                _sample(dataset, key)
            raise _unreadable(f"samples {keys[0]!r} to {keys[-1]!r}", error) from error  # each alone can be
    samples: list[Any] = []
    try:
        for key in keys:  # not by `_sample`: a call more for each costs as much as a small step's update
            samples.append(dataset[key])
    except PotluckError:
        raise
    except Exception as error:
        raise _unreadable(f"sample {keys[len(samples)]!r}", error) from error
    return samples


def _sample(dataset: Any, key: Any) -> Any:
    try:
        return dataset[key]
    except PotluckError:
        raise
    except Exception as error:
        raise _unreadable(f"sample {key!r}", error) from error


def _unreadable(which: str, error: Exception) -> DataError:
    return DataError(
        f"{which} of the data set cannot be read: {in_words(error)}",
        hint="correct the sample or leave it out of the data set; --debug shows where it failed",
    )


class NamesSamples:
    """A data set for worker processes: an error names the index of a sample that cannot be read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        return self.dataset[key]

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        try:
            return read(self.dataset, keys)
        except PotluckError as error:
            return [Unread(error.what, error.hint, traceback.format_exc())]


def length(dataset: Any) -> int:
    """The number of samples. An error says what to give instead of data without numbered samples."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        can = "can only be read from its start" if hasattr(dataset, "__iter__") else "cannot be indexed"
        raise DataError(
            f"the data set is of type {kind}, which {can}",
            hint="give a DataLoader, a map-style data set (len() and [index]) or a torch IterableDataset; or a "
            "function that returns one; or list(data) if it fits into memory",
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise DataError(
            f"the data set is of type {kind}, which has no length",
            hint="give it a __len__ that returns the number of its samples, or give a DataLoader with a sampler of "
            "your own, which says which samples come and in what order",
        ) from error


def to_device(batch: Any, device: Device) -> Any:
    """The same batch with its tensors on `device`."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            raise DataError(
                f"a batch of the loader has a tensor on {tensor.device}",
                hint="leave samples and labels on the CPU: Potluck moves every micro-batch to run.device",
            )
        return device.from_host(tensor)

    return _mapped(batch, moved)


def cloned(batch: Any) -> Any:
    """A copy of the batch, which the loop's body may change in place."""
    return _mapped(batch, Tensor.clone)


def _mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # what the collators of Hugging Face return: its own kind of dict
        same = copy.copy(batch)
        same.update({key: _mapped(value, function) for key, value in batch.items()})
        return same
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, function) for value in batch)
    return batch
