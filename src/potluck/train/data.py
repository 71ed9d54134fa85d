"""The data set as the loop sees it: the order of an epoch, batches of samples, and bringing them to the device.

Owns access to the data set (one thread at a time) and collating. It knows no lease and no network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from potluck.device import Device
from potluck.errors import DataError

Collate = Callable[[list[Any]], Any]


def epoch_order(samples: int, seed: int) -> Callable[[int], Sequence[int]]:
    """For each epoch a permutation that depends on nothing but the seed and the epoch's number."""

    def order(epoch: int) -> Sequence[int]:
        return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)  # type: ignore[return-value]

    return order


class Loader:
    """Fetches and collates samples; host and guests' leases share it, one at a time."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        # A class is a function that returns a data set, though it has the data set's attributes.
        makes_one = isinstance(dataset, type) or (callable(dataset) and not hasattr(dataset, "__getitem__"))
        self._dataset = dataset() if makes_one else dataset
        self._collate = collate or default_collate
        self._lock = threading.Lock()
        self.samples = _length(self._dataset)

    def fetch(self, samples: Sequence[int]) -> Any:
        """The collated batch of these samples, on the CPU."""
        numbers = [int(i) for i in samples]
        with self._lock:
            if hasattr(self._dataset, "__getitems__"):
                items = self._dataset.__getitems__(numbers)
            else:
                items = [self._dataset[i] for i in numbers]
            return self._collate(list(items))

    @contextmanager
    def nobody_reads(self) -> Iterator[None]:
        """Inside, other threads wait before they read: samples may be made with random numbers."""
        with self._lock:
            yield


def _length(dataset: Any) -> int:
    """How many samples there are; what has no numbered samples is named, with what to give instead."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            "run.steps() takes the data set itself, not a DataLoader",
            hint="give loader.dataset, with collate=loader.collate_fn and global_batch=…; Potluck shuffles and "
            "deals the samples",
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        can = "can only be read from its start" if hasattr(dataset, "__iter__") else "cannot be indexed"
        raise DataError(
            f"the data set is of type {kind}, which {can}",
            hint="give a map-style data set (len() and [index]), so that every sample can be counted once; or a "
            "function that returns one; or list(data) if it fits into memory",
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise DataError(
            f"the data set is of type {kind}, which has no length",
            hint="give it a __len__ that returns the number of its samples: an epoch deals each of them once",
        ) from error


def to_device(batch: Any, device: Device) -> Any:
    """The same batch with its tensors on `device`."""
    return _mapped(batch, device.from_host)


def cloned(batch: Any) -> Any:
    """The same batch with tensors of its own, which the loop's body may change in place."""
    return _mapped(batch, Tensor.clone)


def _mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, function) for value in batch)
    return batch
