"""A collate function of the user's runs in the loader's worker processes, and what comes of it there."""

from __future__ import annotations

import os
from collections import UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import potluck
from potluck.balance.leases import next_made
from potluck.errors import DataError
from potluck.train.microbatch import MISSES, REVIEW_S, MicroBatch
from potluck.train.packing import SMALL_BYTES
from potluck.train.torch_loader import TorchLoader
from potluck.train.workers import WorkerLoader

SAMPLES, BATCH = 40, 10


class Words:
    """Samples of unlike lengths."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "tokens": torch.arange(index % 7 + 1)}


class WordStream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Words()[index] for index in range(SAMPLES))


class Given(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def padded(samples: list[dict[str, Any]]) -> UserDict[str, Any]:
    """As the collators of Hugging Face: padded to the longest, in a mapping of its own kind."""
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    index = torch.tensor([sample["index"] for sample in samples])
    return UserDict(
        index=index, tokens=tokens, by=[os.getpid()] * len(samples), worker=get_worker_info() is not None
    )


def opened(workers: int = 1, collate: Any = padded, dataset: Any = None, **more: Any) -> TorchLoader:
    dataset = Words() if dataset is None else dataset
    return TorchLoader(
        DataLoader(dataset, batch_size=BATCH, collate_fn=collate, num_workers=workers, **more), epochs=1
    )


def next_of(loader: TorchLoader) -> int:
    """The first position of the next step, whose samples are here."""
    step = loader.next_step()
    assert step is not None
    loader.ready()
    return step.first


# -- what the workers collate --------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Words(), WordStream()], ids=["map", "stream"])
def test_workers_collate_the_hosts_micro_batches(dataset: Any) -> None:
    with closing(opened(dataset=dataset)) as loader:
        loader.cut(4, anyhow=False)
        for number in range(2):
            at = next_of(loader)
            sizes = []
            while size := loader.made_at(at):
                batch = loader.fetch(range(at, at + size))
                assert type(batch) is UserDict
                assert batch["index"].tolist() == [*range(at, at + size)]
                expected = padded([Words()[index] for index in range(at, at + size)])
                assert torch.equal(batch["tokens"], expected["tokens"]), "padded to the longest of these"
                assert batch["worker"]
                assert os.getpid() not in batch["by"]
                sizes.append(size)
                at += size
            assert sizes == [2, 4, 4], number


def test_any_other_part_is_collated_here_from_the_same_samples() -> None:
    """Another share than expected, a lease, a lease that was taken back."""
    with closing(opened()) as loader:
        loader.cut(4, share=0.6)
        first = next_of(loader)
        assert [loader.made_at(first + row) for row in range(BATCH)] == [2, 0, 4, 0, 0, 0, 0, 0, 0, 0]
        for rows, here in (
            ((0, 1), False),
            ((2, 3, 4, 5), False),
            ((0, 1, 2), True),
            ((6, 7, 8, 9), True),
            ((0, 2, 1), True),
        ):
            batch = loader.fetch([first + row for row in rows])
            assert batch["index"].tolist() == [first + row for row in rows]
            assert batch["worker"] is not here, rows


@pytest.mark.parametrize("workers", [0, 1])
def test_until_a_size_is_known_all_is_collated_here(workers: int) -> None:
    with closing(opened(workers)) as loader:
        first = next_of(loader)
        assert loader.made_at(first) == 0
        assert loader.fetch([first, first + 1])["by"] == [os.getpid()] * 2


def test_what_can_be_read_ahead_is_cut_as_it_was_said_when_it_was_read() -> None:
    """And not more of it is there than without: prefetch_factor steps of each worker, and the one under way."""
    with closing(opened(prefetch_factor=2)) as loader:
        next_of(loader)
        loader.cut(5, anyhow=False)
        sizes = [loader.made_at(next_of(loader)) for _ in range(3)]
        assert sizes[-1] == 5
        assert set(sizes) <= {0, 5}
        assert loader.cut_ahead == 3


def test_while_another_thread_collates_the_host_gets_what_is_made() -> None:
    with closing(opened()) as loader:
        loader.cut(5)
        first = next_of(loader)
        with loader.nobody_reads():  # as while a guest's samples are collated
            got: list[Any] = []
            reader = Thread(target=lambda: got.append(loader.fetch(range(first, first + 5))))
            reader.start()
            reader.join(10)
            assert got
            assert got[0]["worker"]


def test_a_function_that_cannot_be_sent_is_called_here() -> None:
    """Spawned workers cannot be given a lambda; in a plain loop they fail."""
    loader = opened(collate=lambda samples: padded(samples), multiprocessing_context="spawn")
    assert not loader.cut_ahead
    loader.close()
    assert opened(multiprocessing_context="spawn").cut_ahead
    assert opened(collate=lambda samples: padded(samples), multiprocessing_context="fork").cut_ahead
    assert not opened(collate=None).cut_ahead
    assert not opened(0).cut_ahead


# -- the batches themselves ----------------------------------------------------------------------------------


def rich(samples: list[dict[str, Any]]) -> Any:
    count = len(samples)
    return {
        "image": torch.arange(count * 3 * 64 * 64).reshape(count, 3, 64, 64).float(),
        "last": torch.ones(count, 3, 64, 64).contiguous(memory_format=torch.channels_last),
        "array": np.arange(count, dtype=np.int16),
        "label": torch.arange(count),
        "none": None,
        "texts": ["a"] * count,
    }


def test_a_batch_comes_from_a_worker_as_it_is() -> None:
    with closing(opened(collate=rich)) as loader:
        loader.cut(5, anyhow=False)
        first = next_of(loader)
        batch, expected = loader.fetch(range(first, first + 5)), rich([{}] * 5)
    assert torch.equal(batch["image"], expected["image"])
    assert torch.equal(batch["last"], expected["last"])
    assert batch["last"].is_contiguous(memory_format=torch.channels_last)
    assert batch["array"].dtype == np.int16
    assert batch["array"].tolist() == [*range(5)]
    assert (batch["none"], batch["texts"]) == (None, ["a"] * 5)
    assert batch["image"].is_shared()
    # Who keeps the labels of an epoch does not keep its images.
    assert batch["label"].untyped_storage().nbytes() < SMALL_BYTES


def greedy(samples: list[dict[str, Any]]) -> Any:
    """Changes what it is given."""
    labels = [sample.pop("label") for sample in samples]
    tensors = [sample["x"].div_(10) for sample in samples]
    odd = [sample["odd"].append(1) or len(sample["odd"]) for sample in samples]
    return torch.tensor(labels), torch.stack(tensors), odd, [1 / (7 - label) for label in labels]


class Greedy:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"label": index, "x": torch.full((2,), 30.0), "odd": deque([1])}


def test_a_function_that_changes_its_samples_changes_none_that_are_sent() -> None:
    with closing(opened(collate=greedy, dataset=[Greedy()[index] for index in range(7)])) as loader:
        loader.cut(4)
        next_of(loader)
        for rows in ([0, 1], [0, 1, 2, 3], [1, 2]):
            labels, tensors, odd, _ = loader.fetch(rows)
            assert labels.tolist() == rows
            assert tensors.tolist() == [[3.0, 3.0]] * len(rows)
            assert odd == [2] * len(rows)


@pytest.mark.parametrize("alone", [False, True])
def test_samples_that_are_collated_once_are_not_copied(alone: bool) -> None:
    """A stream without workers, as a plain loop reads it; with guests a lease may be taken back."""
    stream = [Greedy()[index] for index in range(4)]
    with closing(opened(0, collate=list, dataset=Given(stream))) as loader:
        loader.cut(2, anyhow=not alone)
        batch = loader.fetch([next_of(loader), 1])
    assert batch[0] is not stream[0], "the collate function may take something out of it"
    assert (batch[0]["x"] is stream[0]["x"]) is alone


@pytest.mark.parametrize("anyhow", [False, True])
def test_the_sample_that_cannot_be_collated_in_a_worker_is_named(anyhow: bool) -> None:
    with closing(opened(collate=greedy, dataset=Greedy())) as loader:
        loader.cut(4, anyhow=anyhow)
        with pytest.raises(DataError, match="the collate function fails on sample 7: ZeroDivisionError") as raised:
            next_of(loader)
    assert "in greedy" in str(raised.value.__cause__), "where it failed"


def test_resuming_goes_on_at_the_next_sample() -> None:
    def indices(loader: TorchLoader, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            at = next_of(loader)
            end = at + BATCH
            while at < end:
                size = loader.made_at(at) or 5
                found += loader.fetch(range(at, at + size))["index"].tolist()
                at += size
        return found

    def shuffled() -> TorchLoader:
        return opened(sampler=torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)).tolist())

    with closing(shuffled()) as whole, closing(shuffled()) as first, closing(shuffled()) as second:
        for loader in (whole, first, second):
            loader.cut(4, anyhow=False)
        expected = indices(whole, 4)
        assert indices(first, 2) == expected[: 2 * BATCH]
        second.resume(2, first.state(2))
        assert indices(second, 2) == expected[2 * BATCH :]
    assert sorted(expected) == [*range(SAMPLES)]


# -- samples of other kinds ------------------------------------------------------------------------------------


@dataclass
class Graph:
    """Samples as those of graph libraries: objects with tensors."""

    x: Tensor
    y: Tensor
    z: Tensor


class Image(Tensor):
    """As torchvision's: a tensor with attributes."""

    side: int


class Angle(np.ndarray):  # type: ignore[type-arg]
    def degrees(self) -> Any:
        return np.degrees(self)


# It makes its second value itself.
class Pair(namedtuple("_Pair", "first second")):
    __slots__ = ()

    def __new__(cls, first: Any) -> Pair:
        return super().__new__(cls, first, first + 1)

    def __reduce__(self) -> Any:
        return Pair, (self[0],)


def image(index: int) -> Image:
    made = torch.full((2, 2), float(index)).as_subclass(Image)
    made.side = index
    return made


class Made:
    """Samples that a function makes of their indices."""

    def __init__(self, make: Callable[[int], Any], count: int = SAMPLES) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def seconds(samples: list[Pair]) -> Tensor:
    return torch.tensor([sample.second for sample in samples])


def filled(samples: list[np.ma.MaskedArray[Any, Any]]) -> Tensor:
    return torch.tensor([sample.filled(-1).tolist() for sample in samples])


def degrees(samples: list[Angle]) -> Tensor:
    return torch.tensor([sample.degrees().tolist() for sample in samples])


def sides(samples: list[Image]) -> Tensor:
    return torch.stack([sample.as_subclass(Tensor) * sample.side for sample in samples])


@pytest.mark.parametrize(
    ("make", "collate"),
    [
        (Pair, seconds),
        (lambda index: np.ma.masked_array([index, 2], mask=[True, False]), filled),
        (lambda index: np.full(2, index / 4).view(Angle), degrees),
        (image, sides),
    ],
    ids=["named tuple", "masked array", "array with a method", "tensor with attributes"],
)
@pytest.mark.parametrize("size", [0, 4], ids=["here", "in a worker"])
def test_a_sample_of_its_own_kind_stays_of_that_kind(make: Any, collate: Any, size: int) -> None:
    with closing(opened(collate=collate, dataset=Made(make))) as loader:
        loader.cut(size)
        first = next_of(loader)
        for rows in ([0, 1], [2, 3, 4, 5], [1, 2]):
            expected = collate([make(first + row) for row in rows])
            assert torch.equal(loader.fetch([first + row for row in rows]), expected)


def test_objects_with_many_tensors_need_no_file_descriptor_each() -> None:
    """A plain loop sends only the batch. Without descriptors a step is lost, and waited for without end."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    count = 300
    graphs = Made(lambda index: Graph(torch.full((3,), index), torch.zeros(2, 4), torch.ones(5)), count)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 60, before[1]))
    try:
        data = DataLoader(graphs, count, collate_fn=list, num_workers=1, timeout=20)  # type: ignore[arg-type]
        with closing(TorchLoader(data, epochs=1)) as loader:
            first = next_of(loader)
            assert [int(graph.x[0]) for graph in loader.fetch(range(first, count))] == [*range(count)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def grown(index: int) -> Tensor:
    return torch.full((1,), float(index), requires_grad=True) * 1


UNSENDABLE = {
    "lambda": (
        lambda index: lambda: torch.full((1,), float(index)),
        lambda samples: torch.stack([each() for each in samples]),
    ),
    "generator": (
        lambda index: (torch.full((1,), float(index)) for _ in range(1)),
        lambda samples: torch.stack([next(each) for each in samples]),
    ),
    "with a gradient": (grown, lambda samples: torch.stack([each.detach() for each in samples])),
}


@pytest.mark.parametrize("kind", UNSENDABLE)
@pytest.mark.parametrize("size", [0, 2])
def test_samples_that_cannot_be_sent_are_collated_as_in_a_plain_loop(kind: str, size: int) -> None:
    """Whatever size was found: samples of which no other part can be made say nothing of it."""
    make, collate = UNSENDABLE[kind]
    with closing(opened(collate=collate, dataset=Made(make), timeout=20)) as loader:
        loader.cut(size, anyhow=False)
        first = next_of(loader)
        assert loader.made_at(first) == BATCH
        assert loader.fetch(range(first, first + BATCH)).flatten().tolist() == [*range(first, first + BATCH)]


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_with_guests_the_sample_that_cannot_be_sent_is_named(kind: str) -> None:
    make, collate = UNSENDABLE[kind]
    data = Made(lambda index: make(index) if index == 3 else torch.zeros(1))
    with closing(opened(collate=collate, dataset=data, timeout=20)) as loader:
        with pytest.raises(DataError, match="a worker process cannot send sample 3: ") as raised:
            next_of(loader)
        assert "pickle" in raised.value.hint


def test_a_batch_that_cannot_be_sent_is_an_error() -> None:
    """A plain loop waits for it without end."""
    with closing(opened(collate=lambda samples: (each for each in samples), timeout=20)) as loader:
        loader.cut(4, anyhow=False)
        with pytest.raises(DataError, match="a worker process cannot send a batch: TypeError"):
            next_of(loader)


def test_default_collate_of_tensors_of_another_class_is_sliced() -> None:
    """As of plain tensors: torchvision's are of their own class. Sent one by one a step took ten times as long."""
    with closing(opened(collate=None, dataset=Made(image))) as loader:
        first = next_of(loader)
        held = loader._held
        assert held is not None
        assert held.is_made([1, 2, 3])
        expected = default_collate([image(index) for index in range(first, first + BATCH)])
        batch = loader.fetch([first + 1, first + 2, first + 3])
        assert torch.equal(batch.as_subclass(Tensor), expected[1:4].as_subclass(Tensor))


def test_default_collate_of_what_has_no_slices_runs_in_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def together(samples: list[Graph], *, collate_fn_map: Any = None) -> tuple[Tensor, bool]:
        return torch.stack([sample.x for sample in samples]), get_worker_info() is not None

    monkeypatch.setitem(default_collate_fn_map, Graph, together)
    graphs = Made(lambda index: Graph(torch.full((3,), index), torch.zeros(1), torch.ones(1)))
    with closing(opened(collate=None, dataset=graphs)) as loader:
        loader.cut(4, anyhow=False)
        first = next_of(loader)
        stacked, in_worker = loader.fetch(range(first, first + loader.made_at(first)))
        assert in_worker
        assert stacked[:, 0].tolist() == [first, first + 1]


# -- in a training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [4, None])
def test_a_training_alone_collates_in_the_workers_and_equals_a_plain_loop(micro_batch: int | None) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(8, 6), nn.Flatten(0, 1), nn.Linear(6, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        tokens, rows = batch["tokens"], batch["tokens"].shape[0]
        values = model(tokens).reshape(rows, -1) * (tokens > 0)
        return ((values.sum(1) - batch["index"] / SAMPLES) ** 2).mean()

    def loader(workers: int) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(5)
        how: dict[str, Any] = {"shuffle": True, "generator": order, "num_workers": workers, "collate_fn": padded}
        return DataLoader(Words(), batch_size=BATCH, **how)  # type: ignore[arg-type]

    epochs, expected, (model, optimizer), batches = 12, [], build(), loader(0)
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    weights = [p.detach().clone() for p in model.parameters()]

    got, by, seen = [], [], []
    model, optimizer = build()
    for step in potluck.start().steps(model, optimizer, loader(2), epochs=epochs, micro_batch=micro_batch):
        for batch in step:
            step.backward(loss_of(model, batch))
            by.append(set(batch["by"]))
            seen += batch["index"].tolist()
        got.append(step.loss)
    assert got == pytest.approx(expected, rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), weights, strict=True))
    each = [sorted(seen[at : at + SAMPLES]) for at in range(0, len(seen), SAMPLES)]
    assert each == [[*range(SAMPLES)]] * epochs, "every sample once in each epoch"
    here = [number for number, pids in enumerate(by) if os.getpid() in pids]
    # While the size is looked for, they are collated here, and the steps that had been read by then.
    assert len(here) < len(by) / 2
    assert by[-1].isdisjoint({os.getpid()})
    assert not micro_batch or not here


def test_a_training_alone_takes_samples_that_cannot_be_sent() -> None:
    """From the first step on, which the workers read before the loop asks for it."""
    make, collate = UNSENDABLE["generator"]
    batches = [[*range(at, at + BATCH)] for at in range(0, SAMPLES, BATCH)]
    data = DataLoader(Made(make), batch_sampler=batches, collate_fn=collate, num_workers=1, timeout=20)  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    seen = []
    for step in potluck.start().steps(model, torch.optim.SGD(model.parameters(), lr=0.01), data, epochs=2):
        for batch in step:
            step.backward(model(batch).mean())
            seen.append(batch.flatten().tolist())
    assert seen == batches * 2


def drawing(samples: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([sample["index"] for sample in samples]) + torch.rand(len(samples))


@pytest.mark.parametrize("own_sampler", [False, True])
def test_a_function_that_draws_draws_as_in_a_plain_loop(own_sampler: bool) -> None:
    """From the first step on, which the workers read before the loop begins where only it says how large it is."""

    def loader() -> DataLoader[Any]:
        batches = [[*range(at, at + BATCH)] for at in range(0, SAMPLES, BATCH)]
        cut: dict[str, Any] = {"batch_sampler": batches} if own_sampler else {"batch_size": BATCH}
        order = torch.Generator().manual_seed(5)
        return DataLoader(Words(), collate_fn=drawing, num_workers=2, generator=order, **cut)  # type: ignore[arg-type]

    plain = loader()
    expected = [batch for _ in range(2) for batch in plain]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    got = []
    for step in potluck.start().steps(model, optimizer, loader(), epochs=2, micro_batch=BATCH):
        for batch in step:
            got.append(batch.clone())
            step.backward(model(batch[:, None]).mean())
    assert torch.equal(torch.stack(got), torch.stack(expected))


def test_a_made_micro_batch_is_taken_unless_it_leaves_a_crumb() -> None:
    assert next_made(10, 4) == 4
    assert next_made(6, 4) == 4
    assert next_made(5, 4) == 0
    assert next_made(4, 4) == 4
    assert next_made(3, 4) == 0, "a lease has some of it"
    assert next_made(9, 0) == 0


def test_a_size_is_reviewed_though_the_other_one_comes_late() -> None:
    """Worker processes have cut the next steps when another size is asked for."""

    def reviewed(lag: int) -> int | None:
        micro = MicroBatch(limit=32, settled=2, reviews=True, lag=lag)
        cut: deque[int] = deque([2] * 40)
        computed_s = 0.0
        while computed_s < 3 * REVIEW_S:
            size = cut.popleft()
            cut.append(micro.size())
            seconds = 0.02 + 0.001 * size
            computed_s += seconds
            micro.record(size, seconds)
        return micro.settled

    assert reviewed(MISSES) == 2
    assert reviewed(40) == 4


# -- what workers cannot send --------------------------------------------------------------------------------


class Unsendable:
    """Samples that a worker process can read and collate, but not send."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, (number for number in range(3))


def firsts(samples: list[Any]) -> Tensor:
    return torch.tensor([index for index, _ in samples])


class Stubborn(Tensor):
    """Nobody can send it, and torch finds that only in the worker's thread that sends."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it stays here")


def sums(samples: list[Any]) -> Tensor:
    return torch.stack([sample.as_subclass(Tensor) for sample in samples])


def test_what_a_worker_finds_unsendable_too_late_is_an_error_not_a_wait() -> None:
    """Python drops it: a plain loop waits forever for such a batch."""
    samples = [torch.ones(2).as_subclass(Stubborn) for _ in range(SAMPLES)]
    unsent = pytest.raises(DataError, match=r"cannot send what it has read: .*it stays here")
    with closing(opened(collate=sums, dataset=Given(samples), timeout=30)) as loader, unsent as failure:
        next_of(loader)
    assert "num_workers=0" in failure.value.hint


def test_by_their_indices_too() -> None:
    loader = WorkerLoader(DataLoader(Unsendable(), batch_size=BATCH, collate_fn=firsts, num_workers=1, timeout=30))
    with closing(loader), pytest.raises(DataError, match="cannot send"):
        loader.fetch([1, 2])
