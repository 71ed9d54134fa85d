"""How a guest says goodbye: a script that failed is told to the host as such, one that left its loop as that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from potluck.cli import join
from potluck.cli._app import Settings
from potluck.errors import LoopError, ScriptError
from potluck.fleet.received import run_work
from potluck.report.sentences import describe
from potluck.spec.config import RunConfig
from potluck.spec.events import GuestLeft
from potluck.spec.messages import Source
from potluck.train import ending, guest_loop, guest_session
from potluck.train.context import GUEST, RunContext
from potluck.train.event_log import EventLog
from potluck.train.guest_loop import GuestTrainer
from potluck.train.guest_session import RUN_FAILED, compute

DEADLINE_S = 10.0


class Hub:
    """As much of a guest's hub as its loop needs; keeps the goodbyes."""

    def __init__(self) -> None:
        self.goodbyes: list[tuple[str, bool]] = []
        self.said = threading.Event()
        self.dropped_samples = 0

    def open(self, sizes: Callable[[], tuple[int, int]]) -> None:
        pass

    def next_work(self) -> Any:
        return SimpleNamespace(step=3, epoch=None)

    def close(self, reason: str, *, failed: bool) -> None:
        self.goodbyes.append((reason, failed))
        self.said.set()


def training(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> tuple[GuestTrainer, Any]:
    monkeypatch.setattr(guest_loop, "Overlap", lambda *ignored: SimpleNamespace(remove=lambda: None))
    device: Any = SimpleNamespace(attach=lambda model: None)
    context = RunContext(role=GUEST, config=RunConfig(), device=device, name="here", log=EventLog(None))
    parts = SimpleNamespace(
        context=context,
        hub=hub,
        model=nn.Linear(1, 1),
        tensors=SimpleNamespace(trained=[], layout=None),
        options=SimpleNamespace(loss_is="mean"),
        micro=None,
        loader=None,
    )
    return GuestTrainer(parts), context  # type: ignore[arg-type]


def test_whoever_opened_the_training_says_why_the_loop_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    trainer, context = training(hub, monkeypatch)

    def script() -> None:
        for _ in trainer.steps():
            raise ValueError("a bug")

    monkeypatch.setattr(ending, "WHY_S", 60.0)
    with pytest.raises(ValueError, match="a bug"):
        script()
    assert hub.goodbyes == []
    context.loop.end("its script failed with ValueError: a bug", failed=True)
    context.loop.end("left")
    assert hub.goodbyes == [("its script failed with ValueError: a bug", True)]


def test_a_script_that_goes_on_after_its_loop_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(ending, "WHY_S", 0.01)
    trainer, _ = training(hub, monkeypatch)
    for _ in trainer.steps():
        break
    assert hub.said.wait(DEADLINE_S)
    assert hub.goodbyes == [("its script left the loop in a step", False)]


class Opened:
    """A guest whose host wants a script that is here; keeps what is said to the host."""

    def __init__(self, *, began: bool, reached: bool = True) -> None:
        self.role = GUEST
        self.loop = SimpleNamespace(began=began, end=self.end)
        self.said: list[tuple[str, bool]] = []
        self.faults: list[str] = []
        self.welcome = SimpleNamespace(message=SimpleNamespace(source=Source(files=("job.py",), sha256="0")))
        self.discarded = 0
        recorder = SimpleNamespace(fault=self.faults.append, write=lambda now: None, discard=self.discard)
        self.link = SimpleNamespace(recorder=recorder, close=self.close, reached=reached)

    def discard(self) -> None:
        self.discarded += 1

    def close(self, reason: str, *, failed: bool = False) -> None:
        self.said.append((reason, failed))

    def end(self, reason: str, *, failed: bool = False) -> None:
        self.said.append((reason, failed))


def serve(opened: Any, script: Path, text: str) -> str:
    """The reason of its end."""
    script.write_text(text)
    view: Any = SimpleNamespace(ended=lambda words: None, close=lambda: None)
    return compute(opened, lambda: run_work(opened, script, lambda words: None), view)


def test_the_host_is_told_that_and_why_a_script_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = Opened(began=True)
    with pytest.raises(ScriptError) as failed:
        serve(opened, tmp_path / "job.py", f"raise ValueError('bad batch {'!' * 500}')")
    reason, is_failure = opened.said[0]
    assert is_failure
    assert reason.startswith("its script failed with ValueError: bad batch !!!")
    assert len(reason) <= 200
    assert opened.faults == [], "its script is at fault: no record for a bug report"
    assert "data set" not in failed.value.hint, "it failed in its loop: how it got there is not the matter"
    assert "the host has been told" in failed.value.hint
    assert "ValueError" in capsys.readouterr().err


def test_one_that_fails_before_its_loop_has_another_hint(tmp_path: Path) -> None:
    with pytest.raises(ScriptError) as failed:
        serve(Opened(began=False), tmp_path / "job.py", "raise ValueError")
    assert "told" not in failed.value.hint


ENDS = [
    ("raise SystemExit(3)", True, SystemExit, ("its script ended with status 3", True)),
    ("raise KeyboardInterrupt", True, KeyboardInterrupt, ("stopped there with Ctrl-C", False)),
    ("", False, LoopError, ("its script failed: the host's script ended without training", True)),
    ("", True, None, ("its script left the loop", False)),
]


@pytest.mark.parametrize(("text", "began", "raised", "said"), ENDS)
def test_other_ends_of_a_script(
    text: str, began: bool, raised: type[BaseException] | None, said: tuple[str, bool], tmp_path: Path
) -> None:
    opened = Opened(began=began)
    with pytest.raises(raised) if raised else nullcontext():
        serve(opened, tmp_path / "job.py", text)
    assert opened.said[0] == said


@pytest.mark.parametrize("reason", ["finished", "interrupted", RUN_FAILED])
def test_a_guest_whose_run_failed_keeps_its_records(reason: str, tmp_path: Path) -> None:
    text = f"from potluck.train.ending import GuestDone\nraise GuestDone({reason!r})"
    opened = Opened(began=True)
    assert serve(opened, tmp_path / "job.py", text) == reason
    assert opened.discarded == (reason != RUN_FAILED), "the records of a run that ended well help nobody"


@pytest.mark.parametrize("reached", [True, False])
def test_a_guest_that_leaves_keeps_its_records_only_where_its_host_is_missing(
    reached: bool, tmp_path: Path
) -> None:
    """Of a loss long past nobody wants to read, and the file lies in the folder for temporary ones."""
    stopped = Opened(began=True, reached=reached)
    with pytest.raises(KeyboardInterrupt):
        serve(stopped, tmp_path / "job.py", "raise KeyboardInterrupt")
    assert stopped.discarded == reached
    done = Opened(began=True, reached=reached)
    serve(done, tmp_path / "job.py", "")
    assert done.discarded


@pytest.mark.parametrize(("reason", "status"), [("finished", 0), (RUN_FAILED, 1)])
def test_join_says_that_the_run_failed_on_its_host(
    reason: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guest_session, "connect", lambda *given, **more: None)
    monkeypatch.setattr(guest_session, "compute", lambda *given: reason)
    flags = dict.fromkeys(("name", "micro_batch", "give_up_s", "runs", "script", "web"))
    token: Any = None
    given: Any = {**flags, "device": "cpu", "threads": 1, "view": "plain"}
    assert join._serve(Settings(), given, token, None, lambda: None) == status
    assert ("the run failed on its host" in capsys.readouterr().err) == bool(status)


def test_a_goodbye_says_what_became_of_the_samples_and_a_failed_one_is_a_fault() -> None:
    left: Any = {"machine": "laptop", "address": "192.0.2.2", "step": 7, "samples_taken_back": 5}
    stopped = describe(GuestLeft(**left, reason="stopped there with Ctrl-C"))
    assert stopped is not None
    words = "laptop (192.0.2.2) left: stopped there with Ctrl-C; its 5 samples were taken back"
    assert (stopped.text, stopped.level) == (words, "info")
    failed = describe(GuestLeft(**left, reason="its script failed with ValueError: x\x1b[2J", failed=True))
    assert failed is not None
    assert failed.level == "bad"
    assert "\x1b" not in failed.text
