"""What a view, a log or a recorder raises is one warning, and ends nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from potluck.failpoints import armed
from potluck.report.guest_view import GuestView
from potluck.report.sentences import describe
from potluck.sinks import guarded
from potluck.spec import events as ev
from potluck.train.event_log import EventLog, events_in
from support import sample_events as sample


class Broken:
    """A view with a bug."""

    def __init__(self) -> None:
        self.called = 0

    def event(self, event: ev.RunEvent) -> None:
        self.called += 1
        if not isinstance(event, ev.RunNote):
            raise TypeError("unsupported format string passed to NoneType.__format__")

    def close(self) -> None:
        raise OSError("gone")


def test_the_first_exception_is_told_and_the_sink_is_still_called() -> None:
    said: list[str] = []
    broken = Broken()
    view = guarded(broken, "the view", said.append)
    for _ in range(3):
        view.event(sample.step(1))
    view.event(ev.RunNote(text="x"))
    view.close()
    assert broken.called == view.called == 4
    assert len(said) == 1
    assert said[0].startswith("the view failed (TypeError: unsupported format string")


def test_ctrl_c_is_no_failure_of_a_view() -> None:
    def interrupted(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(interrupted, "the view")({})


def test_a_view_that_raises_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(None, Broken().event)
    log.emit(sample.step(1))
    log.emit(sample.step(1))
    assert capsys.readouterr().err.count("warning: the view failed") == 1


@pytest.mark.parametrize("mode", ["plain", "json", "auto"])
def test_a_guests_view_shows_a_contribution_without_a_loss(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(None, GuestView(mode).event)
    log.emit(ev.Delivered(step=3, samples=4, loss=None, compute_s=0.5, total_samples=4))
    shown, said = capsys.readouterr()
    assert said == ""
    assert json.loads(shown)["loss"] is None if mode == "json" else "4 samples at 8.00 /s, loss –" in shown


def test_lines_that_could_not_be_written_are_counted_where_they_are_missing(tmp_path: Path) -> None:
    seen: list[ev.RunEvent] = []
    log = EventLog(tmp_path / "events.jsonl", seen.append)
    with armed("events.before-line=raise"):
        log.emit(sample.step(1))
    for step in (2, 3):
        log.emit(sample.step(step))
    log.close()
    found = events_in(tmp_path / "events.jsonl")
    assert [(ev.kind_of(e), getattr(e, "step", None), getattr(e, "lines", None)) for e in found] == [
        ("log_gap", None, 1),
        ("step", 2, None),
        ("step", 3, None),
    ]
    assert [ev.kind_of(e) for e in seen] == ["log_failed", "step", "step", "step"]
    told = describe(seen[0])
    assert told is not None
    assert told.level == "bad"
    assert "the run continues" in told.text


def test_a_terminal_that_cannot_be_asked_is_no_error() -> None:
    view = guarded(GuestView("plain"), "the view", pytest.fail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", io.StringIO())
        view.joined(host="tower", address="192.0.2.1", run="x", name="laptop", device="cpu")
