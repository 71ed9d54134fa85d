"""`run.log(name=value)`: numbers of the script's own, in the log and in the views, from the host only."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from potluck.device import pick
from potluck.errors import LoopError
from potluck.report.frame import frame_lines
from potluck.report.state import RunState
from potluck.report.view import PlainView
from potluck.spec.config import RunConfig
from potluck.spec.events import Logged
from potluck.train.context import ALONE, GUEST, RANK, RunContext
from potluck.train.event_log import EventLog, events_in
from potluck.train.run import Run
from support import sample_events as sample

pytestmark = pytest.mark.usefixtures("one_thread")


def started(file: Path, role: str = ALONE) -> Run:
    log = EventLog(file)
    return Run(
        RunContext(
            role=role, config=RunConfig(checkpoint_every=0), device=pick("cpu", threads=1), name="here", log=log
        )
    )


def logged(file: Path) -> list[tuple[int, dict[str, float | None]]]:
    return [(event.step, event.values) for event in events_in(file) if isinstance(event, Logged)]


def test_a_value_belongs_to_the_steps_that_are_finished(tmp_path: Path) -> None:
    run = started(tmp_path / "events.jsonl")
    model = nn.Linear(2, 1)
    run.log(before=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(model, optimizer, torch.ones(8, 2), global_batch=4, micro_batch=4, steps=2):
        for x in step:
            step.backward(model(x).mean())
        run.log(val=torch.tensor(0.5), rate=np.float32(0.25), broken=float("nan"))
    run.log(after=2)
    values = {"val": 0.5, "rate": 0.25, "broken": None}
    found = logged(tmp_path / "events.jsonl")
    assert found == [(0, {"before": 1.0}), (1, values), (2, values), (2, {"after": 2.0})]


@pytest.mark.parametrize("role", [GUEST, RANK])
def test_nobody_but_the_host_logs(tmp_path: Path, role: str) -> None:
    started(tmp_path / "events.jsonl", role).log(val=object())
    assert not logged(tmp_path / "events.jsonl")


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.ones(2), 10**400], ids=lambda v: type(v).__name__)
def test_what_is_no_number_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(LoopError, match=r"run\.log\(\) was given a .* as accuracy"):
        started(tmp_path / "events.jsonl").log(accuracy=value)
    assert not logged(tmp_path / "events.jsonl")


VALUES: dict[str, float | None] = {"accuracy": 0.93125, "lr": 3e-5, "best": 12.0, "broken": None}
WORDS = "accuracy 0.9313  lr 3e-05  best 12  broken –"


def test_the_plain_view_has_a_line_of_it() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.event(Logged(step=7, values=VALUES))
    view.close()
    assert stream.getvalue() == f"step 7: {WORDS}\n".replace("–", "-")  # this stream is not UTF-8


def test_the_live_view_shows_the_newest_of_each_and_no_news() -> None:
    state = RunState()
    for event in (sample.run_start(), sample.step(1), Logged(step=1, values={"accuracy": 0.5, "lr": 3e-5})):
        state.fold(event)
    state.fold(Logged(step=2, values={"accuracy": 0.93125, "best": 12.0, "broken": None}))
    lines = [line.plain for line in frame_lines(state, width=80, height=24)]
    assert [line.split(maxsplit=1)[1].strip(" │") for line in lines if "accuracy" in line] == [WORDS]
    narrow = frame_lines(state, width=24, height=24)
    assert all(line.width <= 24 for line in narrow)
