"""Steps weighted by items: what the host makes of them, of none at all, and of a guest that counts otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from potluck.device import pick
from potluck.errors import LoopError
from potluck.hub.parity import Reference, Sketch, judge, sketch
from potluck.spec.config import RunConfig
from potluck.spec.events import StepNotApplied
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog
from potluck.train.run import Run
from support.protocol_world import joined

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES = [torch.tensor([float(i)]) for i in range(8)]


def launched(seen: list[Any] | None = None) -> RunContext:
    log = EventLog(None, seen.append if seen is not None else None)
    return RunContext(
        role=ALONE, config=RunConfig(checkpoint_every=0), device=pick("cpu", threads=1), name="here", log=log
    )


def line() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("loss_is", ["mean", "sum"])
def test_the_gradient_is_the_mean_over_the_items_of_all_batches(micro_batch: int, loss_is: str) -> None:
    """Sample i counts i times: 28 items in all, whatever the cut."""
    model, optimizer = line()
    keywords: dict[str, Any] = {"global_batch": 8, "micro_batch": micro_batch, "loss_is": loss_is, "steps": 1}
    for step in Run(launched()).steps(model, optimizer, SAMPLES, **keywords):
        for x in step:
            items = int(x.sum())
            total = (x * model(x).square()).sum()
            step.backward(total / items if loss_is == "mean" else total, items=items)
        assert step.loss == pytest.approx(sum(i**3 for i in range(8)) / 28)
    gradient = sum(2 * i**3 for i in range(8)) / 28
    assert model.get_parameter("weight").item() == pytest.approx(1 - 0.01 * gradient)


def test_a_step_without_items_is_not_applied_and_says_so() -> None:
    model, optimizer = line()
    seen: list[Any] = []
    steps = Run(launched(seen)).steps(model, optimizer, SAMPLES, global_batch=8, micro_batch=4, steps=2)
    for step in steps:
        for x in step:
            some = step.index == 1
            step.backward(model(x).mean() if some else model(x).mean() * math.nan, items=4 if some else 0)
        if step.index == 0:
            assert step.loss is not None
            assert math.isnan(step.loss)
            assert model.get_parameter("weight").item() == 1.0
    (event,) = [e for e in seen if isinstance(e, StepNotApplied)]
    assert event.step == 1
    assert event.machine is None
    assert "items=0 for every batch" in event.reason
    assert model.get_parameter("weight").item() < 1.0, "the next step was not applied either"


def test_a_loop_that_begins_to_count_in_a_later_step_is_named() -> None:
    model, optimizer = line()

    def train() -> None:
        for step in Run(launched()).steps(model, optimizer, SAMPLES, global_batch=8, steps=2):
            for x in step:
                step.backward(model(x).mean(), items=1 if step.index else None)

    with pytest.raises(LoopError, match="step 2 counts items, unlike the steps before it"):
        train()


class TestGuests:
    """A guest that counts otherwise than the host would weigh wrongly."""

    @staticmethod
    def made() -> Sketch:
        return sketch([torch.ones(4)], [4], 1.0)

    def verdict(self, items: float | None, host: float | None, **random: str) -> Any:
        made = self.made()
        reference = Reference(first=made, items=host, random={"cpu": "a"})
        received = memoryview(made.values).cast("B")
        return judge(reference, received, 1.0, items=items, random={"cpu": "a", **random}, names=())

    @pytest.mark.parametrize(
        ("items", "host", "words"),
        [
            (None, 7.0, "without items=…, unlike the host's"),
            (7.0, None, "with items=…, unlike the host's"),
            (6.0, 7.0, "counted 6 items where the host counted 7"),
        ],
    )
    def test_that_counts_otherwise_is_refused(self, items: float | None, host: float | None, words: str) -> None:
        found = self.verdict(items, host)
        assert found.why_not is not None
        assert words in found.why_not

    @pytest.mark.parametrize("items", [None, 0.0, 7.0])
    def test_that_counts_as_the_host_passes(self, items: float | None) -> None:
        assert self.verdict(items, items).why_not is None

    def test_whose_random_numbers_are_others_may_count_others(self) -> None:
        assert self.verdict(6.0, 7.0, cpu="b").why_not is None

    def test_no_items_tell_nothing(self) -> None:
        assert self.verdict(0.0, 0.0).void == "the common batch had no items"

    def test_that_changes_its_mind_does_not_count(self) -> None:
        world = joined("a", batch=12)
        world.begin()
        world.take_all("a")
        world.deliver("a", items=5.0)
        assert not world.decoding
        world.finish()

    def test_items_of_counted_contributions_are_added_up(self) -> None:
        world = joined("a", batch=12)
        world.members["a"].counts_items = True
        for items in (5.0, 0.0):
            world.begin()
            world.take_all("a")
            world.deliver("a", items=items)
            world.decode()
            assert world.finish().guests_items == items
