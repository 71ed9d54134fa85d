"""A run whose device is a step ahead of Python: what is told, saved and raised, and when."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.spec.config import RunConfig
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog
from potluck.train.folder import new_folder
from potluck.train.run import Run
from potluck.train.step import Step
from support.queueing import Queueing

MARKS_A_STEP = 3
"""Two micro-batches and the update."""


def launched(path: Path, device: Queueing, checkpoint_every: int = 0) -> RunContext:
    folder = new_folder(path, "test")
    config, log = RunConfig(checkpoint_every=checkpoint_every), EventLog(folder.events)
    return RunContext(role=ALONE, config=config, device=device, name="host", log=log, folder=folder)


def trained(
    context: RunContext, steps: int | None = 3, after: Callable[[Step], bool] = lambda step: False
) -> list[Step]:
    """All steps; the loop is left where `after` says so."""
    torch.manual_seed(0)
    model, points, done = nn.Linear(4, 1), torch.randn(64, 4), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in Run(context).steps(model, optimizer, points, global_batch=8, micro_batch=4, steps=steps):
        for x in step:
            step.backward(model(x).square().mean())
        done.append(step)
        if after(step):
            break
    return done


def told(context: RunContext) -> list[tuple[str, Any]]:
    assert context.folder is not None
    lines = [json.loads(line) for line in context.folder.events.read_text().splitlines()]
    return [(e["event"], e.get("step")) for e in lines if e["event"] in ("step", "checkpoint", "run_end")]


def test_a_checkpoint_is_told_after_its_step(tmp_path: Path) -> None:
    context = launched(tmp_path, Queueing(0.05), checkpoint_every=1)
    steps = trained(context)
    events = told(context)
    assert [n for kind, n in events if kind == "step"] == [1, 2, 3]
    assert events[-2:] == [("checkpoint", 3), ("run_end", 3)]
    # A save that takes longer than a step, on a slow disk, stands for the next one's too.
    saved = [n for kind, n in events if kind == "checkpoint"]
    assert saved == sorted(set(saved))
    assert all(events.index(("step", n)) < events.index(("checkpoint", n)) for n in saved)
    assert [step.loss is not None and 0 < step.loss < 10 for step in steps] == [True] * 3


def test_a_loop_that_is_left_saves_what_it_has_told(tmp_path: Path) -> None:
    context = launched(tmp_path, Queueing(0.1))
    (step,) = trained(context, None, lambda step: True)
    assert told(context) == [("step", 1), ("checkpoint", 1)]
    context.loop.end("finished")
    assert told(context) == [("step", 1), ("checkpoint", 1), ("run_end", 1)]
    assert step.loss is not None


def test_the_next_step_begins_before_the_last_has_been_computed(tmp_path: Path) -> None:
    context = launched(tmp_path, Queueing(0.2))
    ended: list[tuple[str, Any]] = []
    began = time.monotonic()

    def after(step: Step) -> bool:
        if step.index == 0:
            ended.extend(told(context))
            assert time.monotonic() - began < MARKS_A_STEP * 0.2
            assert step.loss is not None, "reading it waits"
            assert told(context) == [("step", 1)]
        return False

    trained(context, 2, after)
    assert ended == []


def test_a_device_that_fails_in_the_last_step_makes_no_finished_run(tmp_path: Path) -> None:
    context = launched(tmp_path, Queueing(0.03, fails_at=2 * MARKS_A_STEP + 2))
    with pytest.raises(RuntimeError, match="the device failed"):
        trained(context)
    context.loop.end("failed")
    assert context.folder is not None
    last = json.loads(context.folder.events.read_text().splitlines()[-1])
    assert (last["event"], last["step"], last["reason"]) == ("run_end", 2, "failed")
    assert not list(context.folder.checkpoints.glob("step-*"))
