"""`run.state`: the script's own values are in each checkpoint, and back when the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from potluck.device import pick
from potluck.errors import CheckpointError, LoopError, UserError
from potluck.spec.config import RunConfig
from potluck.spec.events import RunStarted
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog, events_in
from potluck.train.folder import RunFolder
from potluck.train.run import Run

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES = [torch.full((2,), float(i)) for i in range(8)]


def started(folder: Path, *, resume: bool = False, every: int = 2) -> Run:
    folder.mkdir(exist_ok=True)
    run_folder = RunFolder(folder)
    context = RunContext(
        role=ALONE,
        config=RunConfig(checkpoint_every=every),
        device=pick("cpu", threads=1),
        name="here",
        log=EventLog(run_folder.events),
        folder=run_folder,
        resume=resume,
    )
    return Run(context)


def train(run: Run, steps: int, **keywords: Any) -> None:
    """A script that counts its steps and keeps the best loss."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.state.setdefault("best", 1e9)
    run.state.setdefault("seen", [])
    for step in run.steps(model, optimizer, SAMPLES, global_batch=4, micro_batch=4, steps=steps, **keywords):
        for batch in step:
            step.backward(model(batch).square().mean())
        assert step.loss is not None
        run.state["best"] = min(run.state["best"], step.loss)
        run.state["seen"].append(step.index)


class Average:
    """An object of the user's, in the manner of an EMA."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


def test_what_was_counted_goes_on_where_it_was(tmp_path: Path) -> None:
    first = started(tmp_path / "run")
    train(first, 3)
    again = started(tmp_path / "run", resume=True)
    train(again, 5)
    assert again.state["seen"] == [0, 1, 2, 3, 4]
    assert again.state["best"] <= first.state["best"] < 1e9


def test_a_checkpoint_has_what_was_set_after_its_step(tmp_path: Path) -> None:
    """It is taken when the next step begins: what the script made of a step belongs to it."""
    run = started(tmp_path / "run")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in run.steps(model, optimizer, SAMPLES, global_batch=4, micro_batch=4, steps=5):
        for batch in step:
            step.backward(model(batch).mean())
        run.state["after"] = step.number
    saved = {
        json.loads(file.read_text())["step"]: json.loads(file.read_text())["state"]["values"]
        for file in (tmp_path / "run").rglob("checkpoints/*/*.json")
    }
    assert saved
    assert all(values == {"after": step} for step, values in saved.items())


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, float("inf"), "words", [1, [2.0, "x"]], (1, 2), {"a": {"b": []}}, {3: "int key"}],
    ids=str,
)
def test_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    run = started(tmp_path / "run")
    run.state["value"] = value
    train(run, 1)
    again = started(tmp_path / "run", resume=True)
    again.state.update(value="a default", new="stays")
    train(again, 2)
    assert again.state["value"] == value
    assert type(again.state["value"]) is type(value)
    assert again.state["new"] == "stays"


@pytest.mark.parametrize("key", ["$tensor", "$tuple", "$float", "$dict"])
def test_a_key_may_be_a_word_that_has_a_meaning_inside_values(tmp_path: Path, key: str) -> None:
    run = started(tmp_path / "run")
    run.state[key] = 3
    train(run, 1)
    again = started(tmp_path / "run", resume=True)
    train(again, 2)
    assert again.state[key] == 3


def test_a_number_that_python_cannot_write_is_refused_at_the_assignment(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    run.state["large"] = 2**8000
    with pytest.raises(UserError, match=r"'huge' of run\.state: it is a number of 20001 bits"):
        run.state["huge"] = 2**20000
    train(run, 1)
    again = started(tmp_path / "run", resume=True)
    train(again, 2)
    assert again.state["large"] == 2**8000


def test_objects_and_tensors_come_back(tmp_path: Path) -> None:
    run, average = started(tmp_path / "run"), Average()
    run.state |= {"average": average, "histogram": torch.arange(5)}
    average.value += 7
    train(run, 1)
    again, fresh = started(tmp_path / "run", resume=True), Average()
    again.state["average"] = fresh
    train(again, 2)
    assert again.state["average"] is fresh
    assert fresh.value.tolist() == [7.0, 7.0]
    assert again.state["histogram"].tolist() == [0, 1, 2, 3, 4]


def test_an_object_that_is_not_there_yet_is_named(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    run.state["average"] = Average()
    train(run, 1)
    with pytest.raises(CheckpointError, match="average") as misfit:
        train(started(tmp_path / "run", resume=True), 2)
    assert (misfit.value.code, misfit.value.step) == ("bad-checkpoint", 1)
    again = started(tmp_path / "run", resume=True)
    again.state["best"] = Average()
    again.state["average"] = Average()
    with pytest.raises(CheckpointError, match="best") as misfit:
        train(again, 2)
    assert (misfit.value.code, misfit.value.step) == ("bad-checkpoint", 1)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.float32(3), {"deep": [print]}], ids=lambda v: type(v).__name__
)
def test_what_cannot_be_saved_is_refused_where_it_is_put_in(tmp_path: Path, value: Any) -> None:
    state = started(tmp_path / "run").state
    for put in (
        lambda: state.__setitem__("best", value),
        lambda: state.update({"best": value}),
        lambda: state.update(best=value),
        lambda: state.setdefault("best", value),
        lambda: state.__ior__({"best": value}),
    ):
        with pytest.raises(UserError, match=r"cannot hold 'best.*' of run\.state"):
            put()
    assert "best" not in state


def test_what_became_bad_inside_is_named_when_it_is_saved(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    run.state["history"] = []
    run.state["history"].append(object())
    with pytest.raises(
        UserError, match=r"cannot hold 'history\.0' of run\.state: it is of type object\n"
    ) as caught:
        train(run, 1)
    assert (caught.value.hint or "").startswith("it holds numbers, strings"), "no state_dict() is involved"


def test_a_key_that_is_no_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match=r"run\.state has the key 3"):
        started(tmp_path / "run").state[3] = 1  # type: ignore[index]


class Endless(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def test_an_endless_run_over_endless_data_is_saved_logged_and_resumed(tmp_path: Path) -> None:
    """Its steps, its epochs and its samples are sys.maxsize, and its seed is a number of numpy's."""

    def trained(run: Run, last: int) -> list[int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        loader = DataLoader(Endless(), 4, sampler=range(100))  # type: ignore[arg-type]
        endless = {"steps": sys.maxsize, "epochs": sys.maxsize}
        numbers = {"seed": np.int64(3), "micro_batch": np.int64(2), "tokens_per_sample": np.int64(1)}
        done = []
        for step in run.steps(model, optimizer, loader, **endless, **numbers):  # type: ignore[arg-type]
            for batch in step:
                step.backward(model(batch).mean())
            done.append(step.number)
            if step.number == last:
                break
        run.close()
        return done

    assert trained(started(tmp_path / "run"), 3) == [1, 2, 3]
    assert trained(started(tmp_path / "run", resume=True), 5) == [4, 5]
    first, *_ = events_in(tmp_path / "run" / "events.jsonl")
    assert isinstance(first, RunStarted)
    assert (first.steps, first.epochs, first.micro_batch) == (sys.maxsize, sys.maxsize, 2)
