"""Checkpoints under faults: killed or failing at every moment of a save, cut, spoilt. Short forms of R3, R4, R5."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import potluck
from potluck.device import pick
from potluck.errors import PotluckError, RunFolderError
from potluck.failpoints import NAMES, armed
from potluck.report.sentences import describe
from potluck.report.summary import read_events
from potluck.spec.config import RunConfig
from potluck.spec.events import CheckpointFailed, CheckpointSaved, RunEnded, StepEnded
from potluck.train import checkpoint, checkpoint_folder
from potluck.train.checkpoint import CheckpointWriter, Loaded, Snapshot, load_latest, save
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder
from potluck.train.launch import launched
from potluck.train.run import Run
from support.campaign import campaign
from support.processes import Processes

MOMENTS = [name for name in NAMES if name.startswith("checkpoint.") and "acknowledge" not in name]
REPLACING = ("checkpoint.before-replace", "checkpoint.replacing", "checkpoint.replaced")
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills by name")


def keep(folder: Path, step: int, value: float) -> Path:
    """A checkpoint all of whose weights are the value."""
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return save(folder, Snapshot(step=step, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))


def newest(folder: Path) -> tuple[int, float]:
    """The step and the value of what would be resumed; all that is there must be whole."""
    loaded = load_latest(folder)
    assert isinstance(loaded, Loaded)
    assert loaded.skipped == ()
    model = nn.Linear(4, 4)
    loaded.restore(model, torch.optim.SGD(model.parameters(), 0.1), {})
    (value,) = {v.item() for p in model.parameters() for v in p.detach().aminmax()}
    return loaded.step, value


def prepared(folder: Path, moment: str) -> tuple[int, float]:
    """Two checkpoints; what comes next is a third, or the second once more."""
    keep(folder, 1, 1.0)
    keep(folder, 2, 2.0)
    return (2, 2.5) if moment in REPLACING else (3, 3.0)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_disk_that_fails_at_any_moment_costs_no_checkpoint(tmp_path: Path, moment: str) -> None:
    step, value = prepared(tmp_path, moment)
    with armed(f"{moment}=raise"), pytest.raises(RunFolderError, match="failpoint") as caught:
        keep(tmp_path, step, value)
    assert caught.value.hint
    assert newest(tmp_path) in ((2, 2.0), (step, value))
    keep(tmp_path, 4, 4.0)
    assert newest(tmp_path) == (4, 4.0)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2
    assert all(name.startswith("step-") and not name.endswith(".new") for name in left)


KILLS = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], os.path.dirname(sys.argv[2])]
from test_checkpoint_faults import MOMENTS, keep, newest, prepared
from potluck import failpoints
for moment in MOMENTS:
    for count in (1, 2):
        folder = Path(sys.argv[1]) / f"{moment}-{count}"
        step, value = prepared(folder, moment)
        child = os.fork()
        if child == 0:
            failpoints.arm(f"{moment}=kill@{count}")
            keep(folder, step, value)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert killed == -signal.SIGKILL or (killed, count) == (0, 2), (moment, killed)
        found = newest(folder)
        allowed = ((step, value),) if killed == 0 else ((2, 2.0), (step, value))
        assert found in allowed, (moment, count, found)
        keep(folder, 4, 4.0)
        assert newest(folder) == (4, 4.0), moment
        assert len(os.listdir(folder)) == 2, os.listdir(folder)
print("done")
"""


@linux
def test_killed_at_every_moment_of_a_save(tmp_path: Path) -> None:
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    with Processes(tmp_path / "logs") as processes:
        done = processes.python(str(script), str(tmp_path), str(Path(__file__).parent))
        assert done.succeeds(deadline_s=50) == "done\n", done.tails()


def test_a_save_that_could_not_be_told_of_is_a_failure(tmp_path: Path) -> None:
    """Acknowledged means that the event is in the log: otherwise the training must hear of it."""
    model = nn.Linear(2, 2)
    snapshot = Snapshot(step=1, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    writer = CheckpointWriter(tmp_path, on_saved=lambda *_: None)
    with armed("checkpoint.before-acknowledge=raise"):
        writer.start(snapshot)
        with pytest.raises(OSError, match="failpoint"):
            writer.wait()
    assert load_latest(tmp_path) is not None


def test_what_must_be_on_the_disk_first_is(tmp_path: Path) -> None:
    order: list[str] = []

    def before() -> None:
        order.append("log synced")
        assert not list(tmp_path.glob("step-*"))

    writer = CheckpointWriter(tmp_path, before=before, on_saved=lambda *_: order.append("told"))
    model = nn.Linear(2, 2)
    writer.start(Snapshot(step=1, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    writer.close()
    assert order == ["log synced", "told"]

    def fail() -> None:
        raise PotluckError("no disk")

    writer = CheckpointWriter(tmp_path, before=fail)
    writer.start(Snapshot(step=2, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    with pytest.raises(PotluckError, match="no disk"):
        writer.close()
    assert load_latest(tmp_path).step == 1  # type: ignore[union-attr]


def trained(folder: Path, *, steps: int, every: int, at: Callable[[int], None] = lambda step: None) -> list[int]:
    """A run alone, in this process; the steps whose checkpoints were acknowledged."""
    run_folder = RunFolder(folder)
    log = EventLog(run_folder.events)
    config = RunConfig(checkpoint_every=every)
    context = RunContext(role=ALONE, config=config, device=pick("cpu"), name="here", log=log, folder=run_folder)
    with closing(log), launched(context):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = [torch.ones(2)] * 8
        for step in potluck.start().steps(model, optimizer, samples, global_batch=4, steps=steps, micro_batch=4):
            for batch in step:
                step.backward(model(batch).mean())
            at(step.index + 1)
    return [e.step for e in read_events(folder) if isinstance(e, CheckpointSaved)]


def test_one_that_falls_due_during_a_save_begins_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write = threading.Event(), checkpoint.save_file

    def slow(*arguments: Any) -> None:
        assert goes_on.wait(30)
        write(*arguments)

    def at(step: int) -> None:
        if step == 130:  # those of 40, 60 … 120 are due by then
            goes_on.set()
            deadline = time.monotonic() + 30
            while any(thread.name == "potluck-checkpoint" for thread in threading.enumerate()):
                assert time.monotonic() < deadline
                time.sleep(0.01)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    saved = trained(tmp_path, steps=145, every=20, at=at)
    assert saved[0] == 20
    # Waiting for the next multiple would lose up to a whole interval more.
    assert saved[1] == 130
    assert saved[-1] == 145


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """The disk is full for the checkpoints of some steps."""
    publish = checkpoint_folder.publish

    def full(folder: Path, step: int, *more: Any, **options: Any) -> Path:
        if fails(step):
            raise RunFolderError(f"cannot write a checkpoint into {folder}: No space left on device", step=step)
        return publish(folder, step, *more, **options)

    monkeypatch.setattr(checkpoint_folder, "publish", full)


def test_a_save_that_fails_is_told_and_tried_again_at_the_next_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda step: step in (4, 6))
    assert trained(tmp_path, steps=9, every=2, at=between_saves) == [2, 8, 9]
    told = [e for e in read_events(tmp_path) if isinstance(e, CheckpointFailed)]
    assert [e.step for e in told] == [4, 6]
    assert "No space left" in told[0].reason
    message = describe(told[0])
    assert message is not None
    assert message.text.startswith("step 4 is not saved: cannot write")
    assert message.text.endswith("; tries again at the next interval")


def test_a_run_whose_last_save_fails_ends_with_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda step: step > 3)
    with pytest.raises(RunFolderError, match="No space left"):
        trained(tmp_path, steps=6, every=2, at=between_saves)
    events = read_events(tmp_path)
    assert [e.step for e in events if isinstance(e, StepEnded)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(events[-1], RunEnded)
    assert events[-1].reason == "failed"
    assert [e.again for e in events if isinstance(e, CheckpointFailed)] == [True, False]


def test_the_last_save_of_a_loop_that_was_left_is_not_lost_with_its_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda step: True)
    folder = RunFolder(tmp_path)
    log = EventLog(folder.events)
    context = RunContext(role=ALONE, config=RunConfig(), device=pick("cpu"), name="here", log=log, folder=folder)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in Run(context).steps(model, optimizer, [torch.ones(2)] * 8, global_batch=4, micro_batch=4):
        for batch in step:
            step.backward(model(batch).mean())
        break
    with pytest.raises(RunFolderError, match="No space left"):
        context.loop.end("finished")
    log.close()
    end = read_events(tmp_path)[-1]
    assert isinstance(end, RunEnded)
    assert end.reason == "failed"


def between_saves(step: int) -> None:
    """A disk that is slower than training would put a save off; here none is."""
    deadline = time.monotonic() + 30
    while any(thread.name == "potluck-checkpoint" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_log_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with armed("events.before-line=raise@4"):
        assert trained(tmp_path, steps=10, every=0) == [10]
    assert "events.jsonl" in capsys.readouterr().err


@linux
def test_kills_inside_the_save_window() -> None:
    figures = campaign("r4_save_window.py", "--times", "6", "--in-place", "0")
    assert figures["times"] == 6


@linux
def test_damage_to_any_file_is_noticed() -> None:
    assert campaign("r5_damage.py", "--times", "80")["times"] == 80
