"""The step after this one: known and read early where that changes nothing, and only there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from potluck.errors import DataError
from potluck.train.step_loader import DataSetLoader, StepLoader
from potluck.train.torch_loader import TorchLoader

SAMPLES, BATCH = 11, 4


class Numbers:
    """Samples that are their index; one of them may not be readable."""

    def __init__(self, bad: int | None = None) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index == self._bad:
            raise ValueError("it is broken")
        return torch.tensor(index)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(i) for i in range(SAMPLES)])


class Own(SequentialSampler):
    """A sampler of the user's own, which may draw random numbers whenever it is asked."""


def torch_loader(workers: int = 0, *, bad: int | None = None, shuffle: bool = True, **more: Any) -> TorchLoader:
    order = torch.Generator().manual_seed(5)
    loader: DataLoader[Tensor] = DataLoader(
        Numbers(bad),  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=shuffle,
        generator=order,
        num_workers=workers,
    )
    return TorchLoader(loader, epochs=2, **more)


def own_collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples)


def run_through(loader: StepLoader, *, look: bool) -> list[list[int]]:
    """The samples of each step; with `look`, the next step's are read first, and must be the same."""
    found: list[list[int]] = []
    coming: list[int] | None = None
    while (step := loader.next_step()) is not None:
        loader.ready()
        positions = range(step.first, step.first + step.count)
        following = loader.peek() if look else None
        early = None
        if following is not None:
            assert following.first == step.first + step.count
            ahead = range(following.first, following.first + following.count)
            parts = [loader.fetch_ahead([p]) for p in ahead]
            assert all(part is not None for part in parts)
            early = torch.cat(parts).tolist()  # type: ignore[arg-type]
        batch = loader.fetch(positions)
        assert batch is not None
        found.append(batch.tolist())
        assert coming in (None, found[-1])
        coming = early
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [None, own_collate])
def test_what_is_read_ahead_is_the_next_step_and_changes_nothing(workers: int, collate: Any) -> None:
    def made() -> TorchLoader:
        loader = torch_loader(workers)
        if collate is None:
            return loader
        user = DataLoader(
            Numbers(),  # type: ignore[arg-type]
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
            num_workers=workers,
            collate_fn=collate,
        )
        return TorchLoader(user, epochs=2)

    plain, looking = made(), made()
    try:
        assert run_through(looking, look=True) == run_through(plain, look=False)
    finally:
        plain.close()
        looking.close()


def test_a_data_set_knows_its_next_step_beyond_an_epoch_but_not_beyond_the_last() -> None:
    def made() -> DataSetLoader:
        return DataSetLoader(Numbers(), None, global_batch=BATCH, seed=1, epochs=2)

    assert run_through(made(), look=True) == run_through(made(), look=False)
    loader, known = made(), []
    while loader.next_step() is not None:
        known.append(loader.peek() is not None)
    assert known == [True] * 5 + [False]


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_known_beyond_the_end_of_a_loaders_epoch(workers: int) -> None:
    loader = torch_loader(workers)
    try:
        known = []
        for _ in range(4):
            assert loader.next_step() is not None
            loader.ready()
            known.append(loader.peek() is not None)
        assert known == [True, True, False, True]
    finally:
        loader.close()


def stream() -> TorchLoader:
    return TorchLoader(DataLoader(Stream(), batch_size=BATCH))


def own_sampler() -> TorchLoader:
    batches = BatchSampler(Own(Numbers()), BATCH, drop_last=False)  # type: ignore[arg-type]
    return TorchLoader(DataLoader(Numbers(), batch_sampler=batches))  # type: ignore[arg-type]


def own_batches() -> TorchLoader:
    batches: Any = [[0, 1], [2, 3], [4]]
    return TorchLoader(DataLoader(Numbers(), batch_sampler=batches))  # type: ignore[arg-type]


def by_index() -> TorchLoader:
    return torch_loader(by_index=True)


@pytest.mark.parametrize("made", [stream, own_sampler, own_batches, by_index])
def test_a_source_that_would_notice_is_not_asked_early(made: Any) -> None:
    loader = made()
    loader.next_step()
    assert loader.peek() is None
    assert loader.fetch_ahead([BATCH]) is None


def test_only_the_next_step_is_read_ahead() -> None:
    loader = torch_loader()
    loader.next_step()
    assert loader.fetch_ahead([0]) is None
    assert loader.fetch_ahead([2 * BATCH]) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_fails_in_its_own_step(workers: int) -> None:
    loader = torch_loader(workers, bad=5, shuffle=False)
    try:
        assert loader.next_step() is not None
        loader.ready()
        assert loader.fetch_ahead([5]) is None
        batch = loader.fetch([0, 1, 2, 3])
        assert batch is not None
        assert batch.tolist() == [0, 1, 2, 3]
        assert loader.next_step() is not None
        with pytest.raises((ValueError, DataError), match="broken"):
            _ready_and_fetch(loader)
    finally:
        loader.close()


def _ready_and_fetch(loader: TorchLoader) -> None:
    loader.ready()
    loader.fetch([4, 5])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_resumes_at_the_same_sample_whatever_was_read_ahead(workers: int) -> None:
    first, second = torch_loader(workers), torch_loader(workers)
    try:
        whole = run_through(torch_loader(), look=False)
        first.next_step()
        first.ready()
        first.fetch_ahead([BATCH])
        second.resume(1, first.state(1))
        assert run_through(second, look=True) == whole[1:]
    finally:
        first.close()
        second.close()


def test_a_random_sampler_that_shares_torchs_numbers_gives_the_order_of_a_plain_loop() -> None:
    def order(look: bool) -> list[list[int]]:
        torch.manual_seed(3)
        data: Any = Numbers()
        return run_through(TorchLoader(DataLoader(data, BATCH, sampler=RandomSampler(data)), epochs=2), look=look)

    assert order(look=True) == order(look=False)


def test_a_data_set_that_takes_long_is_not_read_ahead_for_long() -> None:
    """This step's samples would wait for those of the next."""

    class Slow(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            time.sleep(0.03)
            return super().__getitem__(index)

    loader = DataSetLoader(Slow(), None, global_batch=BATCH, seed=0)
    loader.next_step()
    read = [loader.fetch_ahead([BATCH + i]) is not None for i in range(BATCH)]
    assert read[:4] == [True, True, True, False]
    assert not any(read[3:])
