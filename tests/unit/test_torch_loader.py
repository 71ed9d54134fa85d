"""The steps of a DataLoader: a plain loop's batches in its order, parts of them, epochs, resuming, bad loaders."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import resource_sharer
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from potluck.balance.ledger import Ledger
from potluck.errors import ConfigError, DataError
from potluck.train import packing
from potluck.train.optimizer_state import capture_rng, restore_rng
from potluck.train.packing import HeldStep, packed_samples, unpacked_samples
from potluck.train.torch_loader import TorchLoader, open_steps, reader_of
from potluck.train.workers import worker_errors

SAMPLES = 23


class Numbers:
    """Samples that tell their index, and a random number of whoever reads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "drawn": torch.rand(2), "name": f"number {index}"}


class Grouped:
    """Batches of unlike sizes, as a sampler makes them that groups samples by their length."""

    def __iter__(self) -> Iterator[list[int]]:
        groups = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9], [10, 11, 12, 13]]
        random.shuffle(groups)
        yield from groups


class Eager:
    """A batch sampler that draws when its iteration begins, not when its first batch is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(SAMPLES).split(5)])


class Rotated:
    """A sampler whose order depends on the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % SAMPLES for i in range(SAMPLES)])


class Count(IterableDataset[dict[str, Any]]):
    """A stream without a length; each worker has its part of it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        first, by = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from (Numbers()[i] for i in range(first, SAMPLES, by))


class Sized(Count):
    """The same with a length."""

    def __len__(self) -> int:
        return SAMPLES


class Stateful(IterableDataset[int]):
    """A stream that knows where it is, and counts how often it was read."""

    def __init__(self) -> None:
        self.at = self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SAMPLES:
            self.at += 1
            self.read += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Any] = {
    "in order": lambda **more: DataLoader(Numbers(), batch_size=5, **more),  # type: ignore[arg-type]
    "shuffled": lambda **more: DataLoader(Numbers(), batch_size=5, shuffle=True, **more),  # type: ignore[arg-type]
    "own generator": lambda **more: DataLoader(
        Numbers(),  # type: ignore[arg-type]
        batch_size=5,
        shuffle=True,
        drop_last=True,
        generator=generator(),
        **more,
    ),
    "persistent": lambda **more: DataLoader(
        Numbers(),  # type: ignore[arg-type]
        batch_size=5,
        shuffle=True,
        generator=generator(),
        persistent_workers=more.get("num_workers", 0) > 0,
        **more,
    ),
    "weighted": lambda **more: DataLoader(
        Numbers(),  # type: ignore[arg-type]
        batch_size=4,
        sampler=WeightedRandomSampler(range(1, SAMPLES + 1), 14, generator=generator()),  # type: ignore[arg-type]
        **more,
    ),
    "subset": lambda **more: DataLoader(Subset(Numbers(), [3, 1, 4, 15, 9, 2]), batch_size=4, **more),  # type: ignore[arg-type]
    "subset sampler": lambda **more: DataLoader(
        Numbers(),  # type: ignore[arg-type]
        batch_size=4,
        sampler=SubsetRandomSampler(range(2, 12)),
        **more,
    ),
    "batch sampler": lambda **more: DataLoader(
        Numbers(),  # type: ignore[arg-type]
        batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 6, drop_last=True),
        **more,
    ),
    "grouped": lambda **more: DataLoader(Numbers(), batch_sampler=Grouped(), **more),  # type: ignore[arg-type]
    "eager": lambda **more: DataLoader(Numbers(), batch_sampler=Eager(), **more),  # type: ignore[arg-type]
    "stream": lambda **more: DataLoader(Count(), batch_size=5, **more),
    "sized stream": lambda **more: DataLoader(Sized(), batch_size=5, **more),
    "own collate": lambda **more: DataLoader(
        Numbers(),  # type: ignore[arg-type]
        batch_size=5,
        shuffle=True,
        collate_fn=padded,
        **more,
    ),
}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function of a user's, whose batches cannot be cut."""
    longest = max(len(sample["name"]) for sample in samples)
    names = [sample["name"].ljust(longest) for sample in samples]
    index = torch.tensor([sample["index"] for sample in samples])
    return {"index": index, "drawn": torch.stack([s["drawn"] for s in samples]), "name": [n.strip() for n in names]}


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def plain(loader: Any, epochs: int) -> list[Any]:
    seeded()
    return [batch for _ in range(epochs) for batch in loader]


def steps_of(loader: TorchLoader) -> Iterator[Any]:
    """Every step's batch, put together from parts of two samples that were taken from both ends."""
    while (step := loader.next_step()) is not None:
        loader.ready()
        pool = list(range(step.first, step.first + step.count))
        parts = []
        while pool:
            ends = pool[-2:] if len(parts) % 2 else pool[:2]
            pool = [position for position in pool if position not in ends]
            parts.append((ends, loader.fetch(ends)))
        yield joined([part for _, part in sorted(parts, key=lambda each: each[0])])


def joined(parts: list[Any]) -> Any:
    return {
        "index": torch.cat([p["index"] for p in parts]),
        "drawn": torch.cat([p["drawn"] for p in parts]),
        "name": [name for p in parts for name in p["name"]],
    }


def same(left: Any, right: Any, *, drawn: bool) -> bool:
    equal = torch.equal(left["index"], right["index"]) and left["name"] == right["name"]
    return equal and (not drawn or torch.equal(left["drawn"], right["drawn"]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_steps_are_the_batches_of_a_plain_loop(kind: str, workers: int) -> None:
    """Also what a worker draws: it reads the same batches in the same order, with the same seed."""
    expected = plain(LOADERS[kind](num_workers=workers), 2)
    seeded()
    loader = TorchLoader(LOADERS[kind](num_workers=workers), epochs=2)
    got = list(steps_of(loader))
    assert len(got) == len(expected)
    assert all(same(a, b, drawn=bool(workers)) for a, b in zip(got, expected, strict=True))


RESUMED = [(name, 0) for name in LOADERS if "stream" not in name] + [
    ("weighted", 2),
    ("persistent", 2),
    ("grouped", 2),
]


@pytest.mark.parametrize(("kind", "workers"), RESUMED)
def test_a_run_resumes_at_exactly_the_next_sample(kind: str, workers: int) -> None:
    """After every step: in an epoch, at its end, and in the second one; the script's own random numbers, too."""

    def indices(batches: Any) -> list[list[int]]:
        return [batch["index"].tolist() for batch in batches]

    seeded()
    whole = indices(steps_of(TorchLoader(LOADERS[kind](num_workers=workers), epochs=2)))
    for stop in (1, len(whole) // 2, len(whole) - 1) if not workers else (len(whole) - 2,):
        seeded()
        first = TorchLoader(LOADERS[kind](num_workers=workers), epochs=2)
        steps = steps_of(first)
        before = [next(steps)["index"].tolist() for _ in range(stop)]
        state, drawn = first.state(stop), capture_rng({})
        first.close()
        seeded()
        second = TorchLoader(LOADERS[kind](num_workers=workers), epochs=2)
        restore_rng(drawn)
        second.resume(stop, state)
        assert capture_rng({}) == drawn
        assert before + indices(steps_of(second)) == whole, stop


class Lazy:
    """A batch sampler that draws each batch when it is asked for it."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield [random.randrange(SAMPLES), int(torch.randint(SAMPLES, ()))]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("looks", [False, True])
def test_a_sampler_that_draws_each_batch_resumes_at_the_next_one(looks: bool, again: bool) -> None:
    """Not at the one after it, and no batch twice.

    `looks`: the loop asks whether the epoch ends, which reads a batch ahead; `again`: the last step is repeated.
    """

    def some(loader: TorchLoader, count: int) -> list[Any]:
        taken = []
        for _ in range(count):
            step = loader.next_step()
            assert step is not None
            taken.append(step.keys)
            if looks:
                loader.ends_epoch()
        return taken

    def opened() -> TorchLoader:
        return TorchLoader(DataLoader(Numbers(), batch_sampler=Lazy()))  # type: ignore[arg-type]

    seeded()
    whole = some(opened(), 14)
    for stop in range(1, 9):
        seeded()
        first = opened()
        assert some(first, stop) == whole[:stop]
        state, drawn = first.state(stop - again), capture_rng({})
        random.seed(7)
        second = opened()
        restore_rng(drawn)
        second.resume(stop - again, state)
        assert capture_rng({}) == drawn
        if again:
            step = second.next_step()
            assert step is not None
            assert step.keys == whole[stop - 1]
            if looks:
                second.ends_epoch()
        assert some(second, 14 - stop) == whole[stop:], stop


def test_a_batch_that_was_drawn_and_cannot_be_drawn_again_is_told() -> None:
    """The sampler drew it after something else had drawn, and before the checkpoint: no step has verified it."""

    def opened() -> TorchLoader:
        return TorchLoader(DataLoader(Numbers(), batch_sampler=Lazy()))  # type: ignore[arg-type]

    seeded()
    first = opened()
    first.next_step()
    torch.rand(1)  # the loop's body
    first.ends_epoch()
    state = first.state(1)
    with pytest.raises(DataError, match="batch 2 of epoch 1 cannot be found again") as caught:
        opened().resume(1, state)
    assert "generator=" in caught.value.hint


def test_a_step_that_was_given_but_not_computed_is_given_again() -> None:
    first = TorchLoader(LOADERS["shuffled"](), epochs=1)
    seeded()
    first.next_step()
    given = first.next_step()
    assert given is not None
    second = TorchLoader(LOADERS["shuffled"]())
    second.resume(1, first.state(1))
    assert second.next_step() == given


def test_a_sampler_that_gives_something_else_after_a_restart_is_told() -> None:
    def loader(last: int) -> Any:
        return DataLoader(Numbers(), batch_size=2, sampler=[5, 6, 7, last])  # type: ignore[arg-type]

    first = TorchLoader(loader(8))
    first.next_step()
    first.next_step()
    second = TorchLoader(loader(9))
    with pytest.raises(DataError, match="gives other samples than before: batch 2 of epoch 1"):
        second.resume(2, first.state(2))


def test_a_run_keeps_to_what_it_was_started_with() -> None:
    by_loader = TorchLoader(LOADERS["in order"]())
    by_loader.next_step()
    of_data_set = open_steps(Numbers(), global_batch=5)
    with pytest.raises(ConfigError, match="started with a DataLoader"):
        of_data_set.resume(1, by_loader.state(1))
    with pytest.raises(ConfigError, match="started with a data set"):
        by_loader.resume(1, of_data_set.state(1))


def test_the_sampler_is_told_the_epoch() -> None:
    loader = TorchLoader(DataLoader(Numbers(), batch_size=SAMPLES, sampler=Rotated()), epochs=3)  # type: ignore[arg-type]
    firsts = [step.keys[0] for step in iter(loader.next_step, None) if step is not None and step.keys is not None]
    assert firsts == [0, 1, 2]


def test_a_run_resumes_in_the_epoch_that_the_sampler_was_told() -> None:
    def opened() -> TorchLoader:
        return TorchLoader(DataLoader(Numbers(), batch_size=5, sampler=Rotated()), epochs=3)  # type: ignore[arg-type]

    def keys(loader: TorchLoader, count: int = 99) -> list[Any]:
        return [step.keys for _, step in zip(range(count), iter(loader.next_step, None), strict=False) if step]

    whole = keys(opened())
    for stop in (6, 10, 11):
        first, second = opened(), opened()
        assert keys(first, stop) == whole[:stop]
        second.resume(stop, first.state(stop))
        assert keys(second) == whole[stop:], stop


@pytest.mark.parametrize(("kind", "steps"), [("sized stream", 10), ("stream", None), ("in order", 10)])
def test_the_steps_of_all_epochs_are_known_where_the_loader_has_a_length(kind: str, steps: int | None) -> None:
    assert TorchLoader(LOADERS[kind](), epochs=2).total_steps(None) == steps


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "grouped", "stream"])
def test_the_last_step_of_an_epoch_is_known(kind: str, workers: int) -> None:
    loader = TorchLoader(LOADERS[kind](num_workers=workers), epochs=2)
    seen = []
    while (step := loader.next_step()) is not None:
        loader.ready()
        seen.append((step.epoch, loader.ends_epoch()))
    of_epoch = [[last for epoch, last in seen if epoch == number] for number in (0, 1)]
    assert all(lasts[-1] and not any(lasts[:-1]) for lasts in of_epoch)


def test_a_leases_samples_are_gone_with_their_step() -> None:
    """A lease that was taken back may still be waiting to be read."""
    loader = TorchLoader(LOADERS["in order"]())
    ledger = Ledger(loader)
    ledger.open_step()
    lease = ledger.lease("guest", 2)
    ledger.take_back(lease.id)
    taken = ledger.take(5)
    assert taken == (0, 1, 2, 3, 4)
    ledger.host_counts(taken, "host")
    ledger.close_step()
    ledger.open_step()
    assert loader.fetch(lease.positions) is None
    assert ledger.samples_of([5]) == [5]
    assert ledger.global_batch == 5


def worker_processes() -> list[psutil.Process]:
    """The worker processes of loaders: other tests of this process may have left it a server of processes."""
    return [child for child in psutil.Process().children() if child.pid in {p.pid for p in mp.active_children()}]


# -- streams ------------------------------------------------------------------------------------------------


def test_a_stream_resumes_by_its_own_state() -> None:
    stream = Stateful()
    first = TorchLoader(DataLoader(stream, batch_size=4))
    for _ in range(3):
        first.next_step()
    state, saved = first.state(3), first.objects()["loader"].state_dict()
    stream = Stateful()
    second = TorchLoader(DataLoader(stream, batch_size=4))
    second.objects()["loader"].load_state_dict(saved)
    second.resume(3, state)
    step = second.next_step()
    assert step is not None
    assert step.first == 12
    assert second.fetch(range(12, 16)).tolist() == [12, 13, 14, 15]
    assert stream.read == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_state_is_read_again_and_says_so(workers: int) -> None:
    seeded()
    whole = [
        batch["index"].tolist() for batch in steps_of(TorchLoader(LOADERS["stream"](num_workers=workers), epochs=2))
    ]
    first = TorchLoader(LOADERS["stream"](num_workers=workers), epochs=2)
    for _ in range(3):
        first.next_step()
    state = first.state(3)
    first.close()
    notes: list[str] = []
    second = TorchLoader(LOADERS["stream"](num_workers=workers), epochs=2, note=notes.append)
    second.resume(3, state)
    assert [batch["index"].tolist() for batch in steps_of(second)] == whole[3:]
    assert "the 3 batches before this one are read again" in notes[0]


class Noisy(IterableDataset[float]):
    """A stream whose reading draws random numbers."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(SAMPLES):
            yield random.random() + torch.rand(1).item()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("looks", [False, True])
def test_a_stream_that_draws_random_numbers_gives_the_same_samples_after_a_resume(looks: bool, again: bool) -> None:
    """`looks`: the loop asks if the epoch ends, which reads a batch ahead; `again`: the last step is repeated."""

    def opened() -> TorchLoader:
        return TorchLoader(DataLoader(Noisy(), batch_size=4), epochs=2)

    def some(loader: TorchLoader, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count and (step := loader.next_step()) is not None:
            taken.append(loader.fetch(range(step.first, step.first + step.count)).tolist())
            if looks:
                loader.ends_epoch()
        return taken

    seeded()
    whole = some(opened(), 100)
    per_epoch = len(whole) // 2
    for stop in (1, 2, per_epoch + 1, per_epoch + 2):
        seeded()
        first = opened()
        some(first, stop)
        state, drawn = first.state(stop - again), capture_rng({})
        restore_rng(drawn)
        second = opened()
        second.resume(stop - again, state)
        assert capture_rng({}) == drawn
        assert some(second, 100) == whole[stop - again :], stop


class OneDict(Stateful):
    """A stream that keeps its place in a dict, and gives away that dict itself."""

    def __init__(self) -> None:
        self.place = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.place["at"] < SAMPLES:
            self.place["at"] += 1
            yield self.place["at"] - 1
        self.place["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = dict(state)


class FromStart(Stateful):
    """A stream that begins anew each time, except after its state was put back."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, SAMPLES + 1):
            yield self.at - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("batch", [4, SAMPLES // 2, SAMPLES])
@pytest.mark.parametrize("kind", [Stateful, OneDict, FromStart])
def test_a_stream_with_a_state_resumes_at_every_step(kind: Any, batch: int, looks: bool) -> None:
    """Also at the end of an epoch, where the stream may have gone back to its start; and in a step's middle."""

    def opened() -> TorchLoader:
        return TorchLoader(DataLoader(kind(), batch_size=batch), epochs=2)

    def some(loader: TorchLoader, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count and (step := loader.next_step()) is not None:
            positions = range(step.first, step.first + step.count)
            taken.append((step.epoch, loader.fetch(positions).tolist(), random.random(), torch.rand(1).item()))
            if looks:
                loader.ends_epoch()
        return taken

    def resumed(loader: TorchLoader, step: int) -> TorchLoader:
        state, saved, drawn = loader.state(step), loader.objects()["loader"].state_dict(), capture_rng({})
        second = opened()
        second.objects()["loader"].load_state_dict(saved)
        restore_rng(drawn)
        second.resume(step, state)
        return second

    seeded()
    whole = some(opened(), 99)
    assert [sample for _, samples, *_ in whole for sample in samples] == [*range(SAMPLES)] * 2
    for stop in range(1, len(whole) + 1):
        seeded()
        first = opened()
        assert some(first, stop) == whole[:stop]
        assert some(resumed(first, stop), 99) == whole[stop:], stop
        twice = resumed(resumed(first, stop - 1), stop - 1)
        twice.next_step()
        assert [each[:2] for each in some(resumed(twice, stop - 1), 99)] == [each[:2] for each in whole[stop - 1 :]]


def test_a_stream_that_is_given_as_it_is() -> None:
    loader = open_steps(Count, global_batch=4)
    step = loader.next_step()
    assert step is not None
    assert step.keys is None
    assert loader.fetch([0, 3])["index"].tolist() == [0, 3]


# -- parts of a step ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


class Shapes:
    """Everything that default_collate takes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        array = np.full((2, 3), index, dtype=np.int16)
        half = torch.full((2,), index, dtype=torch.bfloat16)
        return {
            "a": Pair([array, index], (half, f"{index}")),
            "b": (index * 0.5, index % 2 == 0, np.float32(index)),
        }


def collate_elsewhere(samples: list[Any]) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize("collate", [default_collate, collate_elsewhere])
def test_any_part_of_a_step_is_what_collating_it_would_give(collate: Any) -> None:
    loader = TorchLoader(DataLoader(Shapes(), batch_size=8, num_workers=1, collate_fn=collate), epochs=1)  # type: ignore[arg-type]
    loader.next_step()
    loader.ready()
    parts = [(rows, loader.fetch(rows)) for rows in ([2, 3, 4], [7, 0, 3], [5])]
    loader.close()
    for rows, got in parts:
        expected = default_collate([Shapes()[row] for row in rows])
        tensors = [(*each["a"].left, each["a"].right[0], *each["b"]) for each in (got, expected)]
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*tensors, strict=True))
        assert got["a"].right[1] == expected["a"].right[1]
        assert type(got["a"]) is type(expected["a"]) is Pair


def test_small_tensors_of_a_workers_batch_share_no_memory_and_stay_as_they_are() -> None:
    """Each tensor in shared memory costs this process most of a millisecond."""
    samples = [
        (torch.full((80, 80), float(n)), n, {"length": torch.tensor(n, dtype=torch.bfloat16)}) for n in range(4)
    ]
    loader = DataLoader(samples, batch_size=4, num_workers=1)  # type: ignore[arg-type]
    with contextlib.closing(TorchLoader(loader)) as steps:
        steps.next_step()
        steps.ready()
        held = steps._held
        assert held is not None
        pictures, numbers, rest = held.part(range(4))
    assert pictures.is_shared()
    assert not numbers.is_shared()
    assert torch.equal(pictures, torch.stack([picture for picture, *_ in samples]))
    assert torch.equal(numbers, torch.arange(4))
    assert torch.equal(rest["length"], torch.arange(4, dtype=torch.bfloat16))
    numbers += 1  # as a loop may


class Checked(NamedTuple("Checked", [("x", torch.Tensor), ("y", Any)])):
    """Named, and checked when it is made."""

    def __new__(cls, x: Any, y: Any) -> Checked:
        assert isinstance(y, int | torch.Tensor), f"y is {type(y).__name__}"
        return super().__new__(cls, x, y)


def test_a_named_tuple_that_checks_its_fields_comes_from_a_worker_as_it_is() -> None:
    samples = [Checked(torch.ones(2), n) for n in range(4)]
    with contextlib.closing(TorchLoader(DataLoader(samples, batch_size=4, num_workers=1))) as steps:  # type: ignore[arg-type]
        steps.next_step()
        steps.ready()
        batch = steps.fetch(range(4))
    assert type(batch) is Checked
    assert torch.equal(batch.y, torch.arange(4))


def test_a_part_of_a_step_is_not_copied() -> None:
    loader = TorchLoader(DataLoader(Numbers(), batch_size=8, num_workers=1), epochs=1)  # type: ignore[arg-type]
    loader.next_step()
    loader.ready()
    parts = [loader.fetch(rows)["drawn"] for rows in ([0, 1], [2, 3, 4])]
    loader.close()
    assert parts[0].untyped_storage().data_ptr() == parts[1].untyped_storage().data_ptr()


def greedy(samples: list[dict[str, Any]]) -> Any:
    """A collate function that changes what it is given."""
    labels = [sample.pop("label") for sample in samples]
    tensors = [sample["x"].div_(10) for sample in samples]
    arrays = [torch.from_numpy(sample["more"][0].__imul__(2)) for sample in samples]
    odd = [sample["odd"].append(1) or len(sample["odd"]) for sample in samples]
    return torch.tensor(labels), torch.stack(tensors), torch.stack(arrays), odd, 1 / (4 - max(labels))


class Greedy:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"label": index, "x": torch.full((2,), 30.0), "more": (np.ones(2),), "odd": deque([1])}


class GreedyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Greedy()[index] for index in range(5))


@pytest.mark.parametrize(("dataset", "workers"), [(Greedy(), 1), (GreedyStream(), 0)])
def test_a_collate_function_may_change_its_samples(dataset: Any, workers: int) -> None:
    """A part is collated again where the lease on it was taken back."""
    loader = TorchLoader(DataLoader(dataset, batch_size=4, collate_fn=greedy, num_workers=workers))
    loader.next_step()
    loader.ready()
    for rows in ([0, 1], [0, 1], [1, 2]):
        labels, tensors, arrays, odd, _ = loader.fetch(rows)
        assert labels.tolist() == rows
        assert tensors.tolist() == [[3.0, 3.0]] * 2
        assert arrays.tolist() == [[2.0, 2.0]] * 2
        assert odd == [2, 2]
    loader.close()


def test_the_sample_is_named_though_the_collate_function_changed_it() -> None:
    loader = TorchLoader(DataLoader(GreedyStream(), batch_size=5, collate_fn=greedy))
    loader.next_step()
    loader.fetch([0, 1])
    with pytest.raises(DataError, match="fails on sample number 1 of its batch: ZeroDivisionError"):
        loader.fetch([3, 4])


def test_a_sample_that_cannot_be_copied_is_given_as_it_is() -> None:
    locks = [threading.Lock(), threading.Lock()]
    held = HeldStep.of(locks, list)
    assert held.part([1, 0]) == locks[::-1]


def test_arrays_of_another_byte_order_travel_as_they_are() -> None:
    array = np.arange(3, dtype=np.dtype(np.int32).newbyteorder("S"))
    (got,) = unpacked_samples(packed_samples([{"x": array}]))
    assert got["x"].tolist() == [0, 1, 2]


# -- by index -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_by_their_indices(workers: int) -> None:
    """As a guest with its own data, or another rank, reads them: leases that were cut short, too."""
    reader, batch = reader_of(LOADERS["own collate"](num_workers=workers), None, None)
    reader.expect([[1, 2, 3], [4], [5, 6]])
    assert reader.fetch([1, 2, 3])["index"].tolist() == [1, 2, 3]
    assert reader.fetch([4])["index"].tolist() == [4]
    reader.expect([[9, 8], [7]])
    assert reader.fetch([9, 8])["index"].tolist() == [9, 8]
    assert reader.fetch([3])["index"].tolist() == [3]
    reader.close()
    assert batch == 5
    assert not worker_processes()


# -- what cannot be ------------------------------------------------------------------------------------------


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(4 if index == 17 else 3)


class Odd(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"index": index} if index == 2 else {"index": object()}


class Dies(Numbers):
    def __init__(self, how: str) -> None:
        self._how = how

    def __getitem__(self, index: int) -> Any:
        if self._how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)


class Once:
    def __init__(self) -> None:
        self.left = iter(range(6))

    def __iter__(self) -> Iterator[int]:
        return self.left


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


def inverse(samples: list[dict[str, Any]]) -> Any:
    return torch.tensor([1 / (sample["index"] - 17) for sample in samples])


def walk(loader: TorchLoader) -> None:
    try:
        while (step := loader.next_step()) is not None:
            loader.ready()
            for first in range(step.first, step.first + step.count, 2):
                loader.fetch(range(first, min(first + 2, step.first + step.count)))
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate", "what"),
    [
        (Broken(), None, "fails on samples 16 and 17 together: RuntimeError: stack expects each tensor"),
        (Odd(), None, "fails on sample 0: TypeError: default_collate: batch must contain"),
        (Numbers(), inverse, "fails on sample 17: ZeroDivisionError"),
    ],
)
def test_the_sample_that_cannot_be_collated_is_named(dataset: Any, collate: Any, what: str, workers: int) -> None:
    loader = DataLoader(dataset, batch_size=8, collate_fn=collate, num_workers=workers)
    with pytest.raises(DataError, match=what):
        walk(TorchLoader(loader, epochs=1))


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_a_worker_that_dies_is_told_where_its_samples_are_needed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the middle of what is computed meanwhile. torch looks every five seconds."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    loader = TorchLoader(DataLoader(Dies(how), batch_size=2, num_workers=1), epochs=1)  # type: ignore[arg-type]
    loader.next_step()
    (worker,) = worker_processes()
    deadline = time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        sum(range(1000))  # a signal would be handled here
    with pytest.raises(DataError, match="a worker process of the loader died: DataLoader worker"):
        loader.ready()
    loader.close()
    assert not worker_processes()


def test_a_worker_that_dies_while_its_samples_are_received_is_named() -> None:
    """torch raises what the connection to it does, if that comes before it sees the end of the process."""
    read, write = os.pipe()
    try:
        sent = resource_sharer.DupFd(write)
        resource_sharer.stop()
        with (
            pytest.raises(DataError, match="a worker process of the loader died before its samples"),
            worker_errors(),
        ):
            sent.detach()  # type: ignore[attr-defined]
    finally:
        os.close(read)
        os.close(write)
    with pytest.raises(FileNotFoundError), worker_errors():
        raise FileNotFoundError("of a stream")


def full(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
    )


def allocating(samples: list[Any]) -> Any:
    return torch.UntypedStorage._new_shared(8)


@pytest.mark.parametrize("collate", [None, allocating])
@pytest.mark.parametrize("by_index", [False, True])
def test_a_full_dev_shm_is_not_a_samples_fault(
    collate: Any, by_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)  # in the forked workers, too
    data = [torch.zeros(9000) for _ in range(4)]
    given = DataLoader(data, batch_size=2, num_workers=1, collate_fn=collate)  # type: ignore[arg-type]
    loader = TorchLoader(given, epochs=1, by_index=by_index)
    loader.cut(1)

    def read() -> None:
        loader.next_step()
        loader.ready()
        loader.fetch([0, 1])

    with contextlib.closing(loader), pytest.raises(DataError, match="no shared memory left") as caught:
        read()
    assert "--shm-size" in caught.value.hint


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (lambda: DataLoader(Numbers(), batch_size=None), "batch_size=None"),  # type: ignore[arg-type]
        (lambda: DataLoader(Count(), batch_size=None), "batch_size=None"),
        (lambda: Own(Numbers()), "of type Own, which builds its batches itself"),  # type: ignore[arg-type]
        (lambda: DataLoader(iter([1]), batch_size=1), "which can only be read from its start"),  # type: ignore[arg-type]
        (lambda: DataLoader(Numbers(), batch_size=99, drop_last=True), "no batch at all: drop_last"),  # type: ignore[arg-type]
        (lambda: DataLoader(Numbers(), batch_size=3, sampler=Once()), "gave no batch in epoch 2"),  # type: ignore[arg-type]
        (lambda: DataLoader(Numbers(), batch_sampler=[[1, 2], []]), "gave a batch of no samples"),  # type: ignore[arg-type]
    ],
)
def test_a_loader_that_cannot_be_dealt(loader: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        walk(TorchLoader(loader(), epochs=2))


@pytest.mark.parametrize(
    ("given", "keywords", "what"),
    [
        (LOADERS["in order"], {"global_batch": 6}, "global_batch is 6, and the loader's batch_size is 5"),
        (
            DataLoader(Numbers(), batch_sampler=[[0, 1], [2, 3, 4]]),  # type: ignore[arg-type]
            {"global_batch": 6},
            "global_batch is 6, and the loader's batch sampler decides how many samples a step has",
        ),
        (LOADERS["in order"], {"global_batch": None, "collate": padded}, "collate was given together with"),
        (Numbers(), {"global_batch": None}, "does not know how many samples a step has"),
    ],
)
def test_keywords_that_do_not_go_with_what_is_given(given: Any, keywords: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        open_steps(given, **keywords)


class FailsLate:
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from range(13)
        raise ValueError("no more")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_fails_is_told_with_its_place(workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=5, sampler=FailsLate(), num_workers=workers)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="sampler fails after batch 2 of its epoch: ValueError: no more"):
        walk(TorchLoader(loader, epochs=1))


class Named(Numbers):
    """Its samples have names, not numbers."""

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return super().__getitem__(int(str(index)[1:]))


def test_samples_by_names_are_read_here_and_by_workers_but_not_elsewhere() -> None:
    def made(**more: Any) -> DataLoader[Any]:
        return DataLoader(Named(), batch_size=2, sampler=["n3", "n1", "n4"], **more)  # type: ignore[arg-type]

    for workers in (0, 1):
        with contextlib.closing(TorchLoader(made(num_workers=workers), epochs=1)) as loader:
            assert [batch["index"].tolist() for batch in steps_of(loader)] == [[3, 1], [4]]
    local = TorchLoader(made())
    local.check_indices()
    for loader in (local, TorchLoader(made(), by_index=True)):
        with pytest.raises(DataError, match="gives 'n3': other processes can only be told numbers"):
            loader.next_step()


@pytest.mark.parametrize("sampler", [torch.arange(6), np.arange(6)], ids=["torch", "numpy"])
def test_indices_of_other_kinds_are_sent_as_numbers_and_found_again(sampler: Any) -> None:
    def opened() -> TorchLoader:
        loader = TorchLoader(DataLoader(Numbers(), batch_size=2, sampler=sampler), epochs=1)  # type: ignore[arg-type]
        loader.check_indices()
        return loader

    first = opened()
    step = first.next_step()
    assert step is not None
    assert [type(key) for key in step.keys or ()] == [int, int]
    first.next_step()
    second = opened()
    second.resume(1, first.state(1))
    again = second.next_step()
    assert again is not None
    assert again.keys == [2, 3]


def test_other_processes_cannot_read_a_stream() -> None:
    with pytest.raises(DataError, match="no indices"):
        open_steps(LOADERS["stream"], global_batch=None, by_index=True)
    with pytest.raises(DataError, match="no indices"):
        open_steps(LOADERS["stream"], global_batch=None).check_indices()


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_outlives_the_loader(persistent: bool) -> None:
    loader = TorchLoader(LOADERS["shuffled"](num_workers=2, persistent_workers=persistent))
    loader.next_step()
    loader.ready()
    assert len(worker_processes()) == 2
    loader.close()
    assert not worker_processes()


def test_a_text_as_a_list_of_tokens_is_copied_as_one() -> None:
    """The loop may change its batch. A step of texts has thousands of numbers: a call for each would take 5 ms."""
    asked: list[object] = []

    def seen(leaf: object) -> object:
        asked.append(leaf)
        return leaf

    sample: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "words": ("a", None),
        "empty": [],
        "mixed": [1, torch.ones(1), [2.5, True]],
    }
    found = packing._mapped([sample], seen)
    assert found == [sample]
    assert len(asked) == 2, "1 and the tensor beside it"
    found[0]["tokens"][0] = found[0]["mixed"][2][0] = 9
    assert (sample["tokens"][0], sample["mixed"][2][0]) == (1, 2.5)
