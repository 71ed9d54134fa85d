"""The plain, JSON and quiet views, and how a view is chosen."""

from __future__ import annotations

import io
import json
import math
import sys
import threading
from typing import Any

import msgspec
import pytest

from potluck.report.live import LiveView
from potluck.report.sentences import describe
from potluck.report.view import JsonView, PlainView, QuietView, can_be_live, make_view
from potluck.spec import events as ev
from support import sample_events as sample


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Ascii(io.StringIO):
    encoding = "ascii"


def shown(*events: ev.RunEvent, stream: io.StringIO | None = None) -> list[str]:
    stream = stream or Terminal()
    view = PlainView(stream)
    for event in events:
        view.event(event)
    view.close()
    return stream.getvalue().splitlines()


def test_a_step_is_one_line_with_what_matters() -> None:
    (line,) = shown(sample.step(3))
    for part in (
        "step 3/4",
        "loss 2.0000",
        "32.0 samples/s",
        "8.2 k tokens/s",
        "1.25×",
        "ETA 1 s",
        "tower 24 + laptop 8",
    ):
        assert part in line


def test_a_step_with_nothing_measured_yet_still_shows() -> None:
    nothing = dict.fromkeys(("tokens_per_s", "speedup", "eta_s", "loss", "steps"))
    (line,) = shown(sample.step(1, **nothing, machines=[sample.host(32, rate=None)]))
    assert line.startswith("step 1  loss –")
    assert "ETA" not in line
    assert "tokens" not in line


def test_start_and_end() -> None:
    start, join, resumed = shown(sample.run_start(resumed_from=2, trained_parameters=1000))
    assert "1115-gpt" in start
    assert "10.9 M parameters" in start
    assert "1 k of them trained" in start
    assert "may join" in join
    assert "step 2" in resumed
    end, folder = shown(sample.run_end())
    assert end == "finished after step 4, 4.20 s, loss 1.0000, 31.5 samples/s, 1.25× this machine alone"
    assert folder == "run folder: runs/1115-gpt"


def test_a_step_that_was_not_applied_says_so_and_the_end_is_honest() -> None:
    (line,) = shown(sample.step(2, loss=None, applied=False))
    assert "loss –" in line
    assert line.endswith("not applied")
    (why,) = shown(sample.not_applied(step=7, machine=None, reason="the sum is", in_a_row=3))
    assert why == "! step 7 was not applied (3 in a row): the sum is"
    end, _ = shown(sample.run_end(loss=None, not_applied=3))
    assert end.startswith("finished after step 4, 4.20 s, loss –, 3 steps were not applied, ")
    assert "loss" not in shown(sample.run_end(loss=msgspec.UNSET))[0], "no step was made"


@pytest.mark.parametrize("event", sample.news(), ids=ev.kind_of)
def test_everything_else_that_happens_is_one_line_that_names_who_and_why(event: ev.RunEvent) -> None:
    (line,) = shown(event)
    for key in ("machine", "address", "reason", "path", "text"):
        if key != "machine" or not isinstance(event, ev.FlightRecorded):
            assert str(getattr(event, key, "") or "") in line


def test_only_the_first_record_is_told() -> None:
    assert shown(ev.FlightRecorded(machine="tower", path="x", first=False)) == []


def test_what_is_no_news_to_the_host_is_not_shown() -> None:
    assert shown(*sample.quiet()) == []
    assert [describe(event) for event in sample.quiet()] == [None] * len(sample.quiet())


def test_no_colours_even_on_a_terminal() -> None:
    lines = shown(*sample.whole_run(), *sample.news())
    assert not any("\x1b" in line for line in lines)


def test_another_machine_cannot_steer_the_terminal() -> None:
    name = "evil\x1b[2J\nstep 99/99"
    lines = shown(sample.joined(name, device="x" * 10_000))
    assert len(lines) == 1
    assert "\x1b" not in lines[0]
    assert len(lines[0]) < 1000


def test_a_stream_without_utf8_gets_ascii() -> None:
    lines = shown(*sample.whole_run(), ev.RunNote(text="Grüße – 1×"), stream=Ascii())
    assert all(line.isascii() for line in lines)
    assert any("1.25x" in line for line in lines)
    assert lines[-1].endswith("- 1x")


def test_every_line_is_flushed_at_once() -> None:
    class Buffered(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    stream = Buffered()
    view = PlainView(stream)
    view.event(sample.step(1))
    assert stream.flushed == 1


@pytest.mark.parametrize("kind", [PlainView, JsonView])
def test_a_reader_that_is_gone_does_not_stop_the_run(kind: type[PlainView] | type[JsonView]) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    view = kind(Broken())
    view.event(sample.step(1))
    view.event(sample.step(2))
    view.close()


def test_json_lines_are_the_events() -> None:
    stream = io.StringIO()
    view = JsonView(stream)
    for event in sample.whole_run():
        view.event(event)
    assert [ev.from_json(line) for line in stream.getvalue().splitlines()] == sample.whole_run()


def test_json_stays_json_when_the_loss_is_not_a_number() -> None:
    stream = io.StringIO()
    JsonView(stream).event(sample.step(1, loss=math.nan, machines=(sample.host(rate=math.inf),)))

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    event = json.loads(stream.getvalue(), parse_constant=no_constant)
    assert event["loss"] is None
    assert event["machines"][0]["rate"] is None
    assert event["step_s"] == 1.0


@pytest.mark.parametrize("kind", [PlainView, JsonView])
def test_nothing_is_shown_after_close(kind: type[PlainView] | type[JsonView]) -> None:
    stream = io.StringIO()
    view = kind(stream)
    view.close()
    view.event(sample.step(1))
    assert stream.getvalue() == ""


def test_lines_from_many_threads_do_not_mix() -> None:
    stream = io.StringIO()
    view = JsonView(stream)
    threads = [threading.Thread(target=lambda: [view.event(sample.step(n)) for n in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in stream.getvalue().splitlines()]) == 200


class TestChoice:
    def test_auto_is_live_on_a_terminal_and_plain_in_a_pipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        assert isinstance(make_view("auto", Terminal()), LiveView)
        assert isinstance(make_view("auto", io.StringIO()), PlainView)

    def test_a_dumb_or_non_utf8_terminal_is_not_live(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        assert not can_be_live(Terminal())
        monkeypatch.setenv("TERM", "xterm")
        assert can_be_live(Terminal())
        terminal = Terminal()
        terminal.encoding = "latin-1"
        assert not can_be_live(terminal)

    def test_the_others_are_taken_at_their_word(self) -> None:
        assert isinstance(make_view("plain", Terminal()), PlainView)
        assert isinstance(make_view("json", Terminal()), JsonView)
        assert isinstance(make_view("quiet", Terminal()), QuietView)


def test_a_step_says_how_many_samples_each_machine_computes_at_once() -> None:
    machines = [sample.host(24, micro_batch=12), sample.machine("laptop", 8, micro_batch=8)]
    (fleet,) = shown(sample.step(1, machines=machines))
    assert "tower 24 by 12 + laptop 8 by 8" in fleet
    (alone,) = shown(sample.step(1, machines=[sample.host(32, micro_batch=16)]))
    assert alone.endswith("16 at once")


class TestRepeats:
    """With steps of milliseconds, one late guest must not fill the terminal."""

    def run(self, *turns: tuple[float, ev.RunEvent]) -> list[str]:
        stream, now = io.StringIO(), 0.0
        view = PlainView(stream, clock=lambda: now)
        for at, event in turns:
            now = at
            view.event(event)
        view.close()
        return stream.getvalue().splitlines()

    def test_another_reason_is_shown_at_once(self) -> None:
        first, other = (
            "was too late 2 times in a row; tries again at step 9",
            "cannot deliver one sample within a step",
        )
        lines = self.run(
            *((n / 1000, sample.sits_out(step=n, reason=first)) for n in range(1, 5)),
            (0.1, sample.sits_out(step=69, reason=other)),
            (0.2, sample.step(70)),
        )
        assert lines[1] == f"! laptop sits out: {other}"
        assert lines[2].startswith("step 70")

    def test_what_repeats_within_seconds_is_one_line_with_a_count(self) -> None:
        late = sample.taken_back
        lines = self.run(
            *((n / 1000, late(step=n)) for n in range(1, 1001)), (5.1, late(step=1001)), (5.2, late(step=1002))
        )
        assert lines == [
            "! laptop (10.0.0.7) was late during step 1; its 8 samples were taken back",
            "! (999 times) laptop (10.0.0.7) was late during step 1000; its 8 samples were taken back",
            "! (2 times) laptop (10.0.0.7) was late during step 1002; its 8 samples were taken back",
        ]

    def test_what_is_left_comes_before_the_end(self) -> None:
        lines = self.run((0.0, sample.taken_back()), (0.1, sample.taken_back(step=3)), (0.2, sample.run_end()))
        assert [line[:5] for line in lines] == ["! lap", "! lap", "finis", "run f"]
        assert "step 3" in lines[1]
        assert "times" not in lines[1]

    def test_a_step_brings_what_is_due(self) -> None:
        lines = self.run((0.0, sample.taken_back()), (0.1, sample.taken_back(step=3)), (6.0, sample.step(4)))
        assert ["step 3" in line for line in lines] == [False, True, False]
        assert lines[2].startswith("step 4/4")

    def test_others_are_not_kept_back(self) -> None:
        sits_out = ev.GuestSitsOut(machine="laptop", step=2, reason="too slow")
        lines = self.run(
            (0.0, sample.taken_back()),
            (0.1, sample.taken_back(machine="pi")),
            (0.2, sits_out),
            (0.3, sample.not_applied()),
            (0.4, sample.not_applied()),
        )
        assert len(lines) == 5

    def test_after_a_quiet_while_the_next_is_shown_at_once(self) -> None:
        late = sample.taken_back
        lines = self.run((0.0, late()), (9.0, late(step=3)), (20.0, sample.step(1)), (99.0, sample.not_applied()))
        assert [line[:5] for line in lines] == ["! lap", "! lap", "step ", "! ste"]
        assert "step 3" in lines[1]


@pytest.mark.parametrize(
    ("steps", "epochs", "said"),
    [
        (None, None, "steps without end of 32 samples"),
        (None, 1, "1 epoch in steps of 32 samples"),
        (None, 3, "3 epochs in steps of 32 samples"),
        (12, 3, "12 steps of 32 samples"),
    ],
)
def test_a_stream_that_is_read_for_some_epochs_has_an_end(steps: int | None, epochs: int | None, said: str) -> None:
    line, *_ = shown(sample.run_start(steps=steps, epochs=epochs))
    assert f", {said}, " in line


@pytest.mark.parametrize("mode", ["auto", "plain", "live", "json"])
def test_with_stdout_closed_from_the_start_nothing_is_shown(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python then has None for it, as in a service or under pythonw."""
    monkeypatch.setattr(sys, "stdout", None)
    make_view(mode).event(sample.step(1))
