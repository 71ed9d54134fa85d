"""The common batch in the host's own loop: it draws what the guests will draw, and leaves the run as it was."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import potluck
from potluck.hub.actions import CommonBatch
from potluck.hub.alone import AloneHub
from potluck.hub.inputs import Packed
from potluck.hub.parity import Reference
from potluck.train import run as runs
from potluck.train import torch_loader
from potluck.train.step_loader import DataSetLoader
from potluck.wire.tree import pack_tree, unpack_tree

STEPS, BATCH, CHECKED = 6, 8, (1, 2, 4)
OWN = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))


class Table:
    """A hub without guests that wants a common batch in some steps."""

    twice: frozenset[str] | None = None
    coded = True
    made: list[Table]

    def __init__(self, ledger: Any, name: str, *more: Any) -> None:
        self._hub, self._ledger = AloneHub(ledger, name, *more), ledger
        self.references: list[Reference] = []
        self.batches: list[Any] = []
        self.same_again: list[bool] = []
        self.common: CommonBatch | None = None
        """What the body computes now, if it is a common batch."""
        self._due = False
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)

    def begin_step(self, head_start_s: float = 0.0) -> None:
        self._hub.begin_step(head_start_s)
        self._due = self._ledger.step in CHECKED

    def take(
        self, count: int, busy: Callable[[], bool], made: Callable[[], int]
    ) -> tuple[tuple[int, ...], CommonBatch | None]:
        due, self._due = self._due, False
        self.common = CommonBatch(samples=2, seed=self._ledger.step + 1, twice=self.twice) if due else None
        return self._hub.take(2, busy, made)[0], self.common

    def replica_in_place(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(self.coded)  # the codec rounds nothing

    def pack_common(self, batch: Any) -> Packed:
        tree, frames = pack_tree(batch)
        return Packed(tree=tree, frames=tuple(bytes(frame) for frame in frames))

    def check_computed(self, positions: tuple[int, ...], reference: Reference, batch: Packed) -> None:
        self.same_again.append(batch.same_again)
        self.references.append(reference)
        self.batches.append(unpack_tree(batch.tree, batch.frames))


class Data:
    """Samples that are the same whoever reads them, though reading draws random numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random.random()
        return torch.full((6,), index / 32.0), index % 3


Body = Callable[[nn.Module, Tensor, Tensor], Tensor]


def trained(body: Body, dataset: Any = None, data: str = "sent") -> tuple[nn.Module, list[float]]:
    """A run of the real loop: the model, and each step's loss."""
    for seed_with in (random.seed, np.random.seed, torch.manual_seed):
        seed_with(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    run, dataset = potluck.start(), dataset or Data()
    for step in run.steps(model, optimizer, dataset, global_batch=BATCH, steps=STEPS, micro_batch=2, data=data):
        for x, y in step:
            step.backward(body(model, x, y))
        losses.append(step.loss)
    assert None not in losses
    return model, losses  # type: ignore[return-value]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """From here on runs have common batches; all their hubs."""
    Table.made, Table.twice = [], None
    monkeypatch.setattr(runs, "AloneHub", Table)
    return Table.made


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5)  # in place: the guests' copy must be from before
    return F.cross_entropy(model(x), y)


def test_a_common_batch_leaves_no_trace_in_a_run_computed_once_or_twice(checked: list[Table]) -> None:
    Table.twice = frozenset({"cpu"})
    twice, losses = trained(plain)
    Table.twice = None
    once, same = trained(plain)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(once.state_dict().values(), twice.state_dict().values()))
    assert [r.second is None for r in checked[0].references] == [False] * len(CHECKED)
    assert [r.second is None for r in checked[1].references] == [True] * len(CHECKED)


def test_where_the_replica_is_not_coded_yet_there_is_no_second_gradient_and_guests_are_checked_again(
    checked: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "coded", False)
    monkeypatch.setattr(Table, "twice", frozenset())
    found, losses = trained(plain)
    monkeypatch.setattr(Table, "twice", None)
    once, same = trained(plain)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(once.state_dict().values(), found.state_dict().values()))
    assert [(r.second, r.uncoded) for r in checked[0].references] == [(None, True)] * len(CHECKED)
    assert not any(r.uncoded for r in checked[1].references)


def test_where_it_is_not_coded_yet_random_numbers_still_tell_the_hosts_spread(
    checked: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest of another kind draws other numbers. Coding a large model may take longer than the host waits."""
    monkeypatch.setattr(Table, "coded", False)
    monkeypatch.setattr(Table, "twice", frozenset({"cpu"}))
    trained(lambda model, x, y: F.cross_entropy(model(F.dropout(x, 0.5)), y))
    for reference in checked[0].references:
        assert reference.uncoded
        assert reference.second is not None
        assert not np.array_equal(reference.second.values, reference.first.values)


def test_the_run_is_that_of_a_run_without_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, losses = trained(plain)
    Table.made, Table.twice = [], frozenset()
    monkeypatch.setattr(runs, "AloneHub", Table)
    with_checks, same = trained(plain)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(alone.state_dict().values(), with_checks.state_dict().values()))


def test_random_numbers_go_on_as_if_there_had_been_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float, float]] = []

    def body(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return plain(model, x, y)

    trained(body)
    alone, drawn = drawn, []
    Table.made, Table.twice = [], frozenset({"python", "numpy", "cpu"})
    monkeypatch.setattr(runs, "AloneHub", Table)
    trained(body)
    # Only the body draws from numpy and torch here. In a check it ran twice, with numbers that are not the run's.
    without_checks = [numbers[1:] for numbers in drawn if numbers[1:] in {n[1:] for n in alone}]
    assert without_checks == [numbers[1:] for numbers in alone][: len(without_checks)]
    assert len(drawn) == len(alone) + len(CHECKED)
    assert len(without_checks) == len(alone) - len(CHECKED)


def test_the_guests_get_the_batch_as_it_was_before_the_loop_changed_it(checked: list[Table]) -> None:
    seen: list[Tensor] = []

    def body(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(x.clone())
        return plain(model, x, y)

    Table.twice = frozenset()
    trained(body)
    for number, (x, y) in enumerate(checked[0].batches):
        first = CHECKED[number] * BATCH // 2 + number  # each check before it computed two samples once more
        assert torch.equal(seen[first], x), "the uncounted one"
        assert torch.equal(seen[first + 1], x), "the counted one"
        assert y.dtype == torch.int64


class RandomData(Data):
    """Nobody reads the same sample twice."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(index)
        return x + torch.rand((), generator=OWN), y


def test_local_data_that_is_random_is_told_from_data_that_is_not(checked: list[Table]) -> None:
    once = trained(plain)[1]
    assert trained(plain, data="local")[1] == once, "reading a second time must not move the random numbers on"
    trained(plain, RandomData(), data="local")
    assert [table.same_again for table in checked] == [[same] * len(CHECKED) for same in (False, True, False)]


@pytest.mark.parametrize("kind", ["python", "numpy", "cpu", "own", "none"])
def test_the_spread_is_of_what_is_drawn_otherwise_and_only_that(checked: list[Table], kind: str) -> None:
    """What can be matched is the same in both computings: a wrong guest has no excuse."""

    def body(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        numbers = {
            "python": random.random(),
            "numpy": np.random.rand(),
            "cpu": float(torch.rand(())),
            "own": float(torch.rand((), generator=OWN)),
            "none": 0.5,
        }
        return F.cross_entropy(model(x * (0.5 + numbers[kind])), y)

    for twice in (frozenset[str](), frozenset({kind})):
        Table.twice = twice
        trained(body)
    for table, differs in zip(checked, (kind == "own", kind != "none")):
        for reference in table.references:
            assert reference.second is not None
            assert (reference.second.loss != reference.first.loss) == differs


def test_two_machines_with_the_same_seed_end_with_equal_digests(checked: list[Table]) -> None:
    for _ in range(2):
        trained(lambda model, x, y: plain(model, x + torch.rand(()) * random.random(), y))
    ours, theirs = ([r.random for r in table.references] for table in checked)
    assert ours == theirs
    assert ours[0].keys() == {"python", "numpy", "cpu"}
    assert ours[0] != ours[1], "another seed for each check"


def test_others_read_after_the_common_batch_or_when_the_run_ends_in_it(
    checked: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading draws random numbers here: nobody else does while the common batch is computed."""
    loaders: list[DataSetLoader] = []

    class Watched(DataSetLoader):
        def __init__(self, *given: Any, **keywords: Any) -> None:
            super().__init__(*given, **keywords)
            loaders.append(self)

    monkeypatch.setattr(torch_loader, "DataSetLoader", Watched)
    has_read = threading.Event()
    reader = threading.Thread(
        target=lambda: (loaders[0].fetch([BATCH * step.index + 1]), has_read.set()), daemon=True
    )
    model = nn.Linear(6, 3)
    optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), potluck.start()
    steps = run.steps(model, optimizer, Data(), global_batch=BATCH, steps=STEPS, micro_batch=2)
    for step in steps:
        batches = iter(step)
        for x, y in batches:
            if checked[0].common is not None:
                break
            step.backward(plain(model, x, y))
        else:
            continue
        break
    reader.start()
    assert not has_read.wait(0.1), "somebody read while the common batch was computed"
    run._context.loop.end("failed")  # as the command line does where a script has failed
    reader.join(10)
    assert has_read.is_set()
