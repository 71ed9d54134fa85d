"""The live view: its state, its picture at every size, and the terminal it leaves."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from potluck.report.frame import frame_lines
from potluck.report.line import Line, cut
from potluck.report.live import LiveView
from potluck.report.state import History, RunState
from potluck.spec import events as ev
from support import sample_events as sample


def state_after(*events: ev.RunEvent) -> RunState:
    state = RunState()
    for event in events:
        state.fold(event)
    return state


def picture(state: RunState, width: int = 80, height: int = 24, **clock: float) -> list[str]:
    return [line.plain for line in frame_lines(state, width=width, height=height, **clock)]


def busy_run() -> RunState:
    machines = [
        sample.host(),
        sample.machine("laptop", 8),
        sample.machine("東京のノートパソコン", 0, state="sitting out", reason="too slow for a step of 1.0 s " * 3),
    ]
    return state_after(
        sample.run_start(), *(sample.step(n, machines=machines) for n in range(1, 4)), *sample.news()
    )


def test_the_picture_says_what_the_brief_of_a_run_is() -> None:
    text = "\n".join(picture(busy_run(), 120, 40))
    for part in (
        "1115-gpt",
        "gpt",
        "10.9 M parameters",
        "3/4",
        "75 %",
        "ETA 1 s",
        "2.0000",
        "32.0 samples/s",
        "8.2 k tokens/s",
        "1.25× this machine alone",
        "laptop",
        "guest",
        "8.00 /s",
        "90 %",
        "sitting out",
        "too slow",
        "a word to the reader",
    ):
        assert part in text


@pytest.mark.parametrize("width", [1, 20, 30, 40, 50, 60, 79, 80, 100, 120, 200])
@pytest.mark.parametrize("height", [1, 5, 10, 24, 60])
def test_it_fits_every_terminal(width: int, height: int) -> None:
    for state in (busy_run(), state_after(sample.run_start()), RunState()):
        lines = picture(state, width, height)
        assert len(lines) <= height
        assert all(cell_len(line) <= max(width, 20) for line in lines), max(lines, key=cell_len)


def test_who_and_in_which_state_stays_on_a_narrow_terminal() -> None:
    idle = sample.machine("pi", 0, state="sitting out", reason="too slow for a step of 1.0 s")
    machines = [sample.host(), sample.machine("laptop", 8), idle]
    text = "\n".join(picture(state_after(sample.run_start(), sample.step(1, machines=machines)), 40))
    for part in ("laptop", "computing", "pi", "sitting out", "too slow for a step of 1.0 s"):
        assert part in text


def test_columns_stand_under_their_headers() -> None:
    lines = picture(state_after(sample.run_start(), sample.step(1)), 80)
    header = next(line for line in lines if line.startswith(" machine"))
    row = next(line for line in lines if line.startswith(" laptop"))
    assert row.index("computing") == header.index("state")
    assert row.index("guest") == header.index("role")


def test_many_machines_are_counted_not_scrolled() -> None:
    machines = [sample.host(), *(sample.machine(f"guest-{n}", 1) for n in range(40))]
    lines = picture(state_after(sample.run_start(), sample.step(1, machines=machines)), 80, 20)
    shown = sum(line.strip().startswith("guest-") for line in lines)
    (more,) = [line for line in lines if "more machines" in line]
    assert f"and {40 - shown} more machines" in more
    assert shown >= 5


def test_the_eta_counts_down_between_steps() -> None:
    state = state_after(sample.run_start(), sample.step(1, eta_s=100.0))
    assert "ETA 1 min 40 s" in "\n".join(picture(state))
    assert "ETA 1 min 10 s" in "\n".join(picture(state, since_step_s=30.0))
    assert "ETA 0 s" in "\n".join(picture(state, since_step_s=1000.0))


def test_a_run_without_end_shows_no_bar() -> None:
    text = "\n".join(picture(state_after(sample.run_start(steps=None), sample.step(7, steps=None)), elapsed_s=90))
    assert "step   7   1 min 30 s so far" in text
    assert "%" not in text.splitlines()[2]


def test_a_loss_that_is_not_a_number_is_seen() -> None:
    state = state_after(sample.run_start(), sample.step(1), sample.step(2, loss=None))
    (line,) = [line for line in frame_lines(state, width=80, height=24) if "loss" in line.plain]
    assert ("–", "bold red") in line.parts


def test_steps_that_were_not_applied_are_counted() -> None:
    bad = sample.not_applied(in_a_row=1, reason="own gradient is not finite")
    steps = [sample.step(n, loss=None if n < 4 else 1.0, applied=n == 4) for n in (2, 3, 4)]
    state = state_after(sample.run_start(), sample.step(1), bad, *steps)
    lines = frame_lines(state, width=80, height=24)
    (line,) = [line for line in lines if "loss " in line.plain]
    assert ("  2 not applied", "bold red") in line.parts
    assert any("the step was not applied: tower's own gradient is not finite" in line.plain for line in lines)


def test_a_slower_fleet_is_marked() -> None:
    def style(speedup: float) -> str:
        lines = frame_lines(state_after(sample.run_start(), sample.step(1, speedup=speedup)), width=80, height=24)
        return next(style for line in lines for text, style in line.parts if "this machine alone" in text)

    assert style(1.2) == "bold green"
    assert style(1.0) == ""
    assert style(0.8) == "bold yellow"


def test_a_guest_shows_before_the_next_step_ends() -> None:
    hello, joined, _, lost, *_ = sample.news()
    state = state_after(sample.run_start(), sample.step(1, machines=[sample.host()]), hello)
    assert [(m.name, m.state) for m in state.machines] == [("tower", "computing"), ("laptop", "joining")]
    state.fold(joined)
    assert state.machines[1].state == "syncing"
    state.fold(lost)
    assert (state.machines[1].state, state.machines[1].reason) == ("gone", "silent for 5 s")


def test_a_message_that_repeats_is_counted() -> None:
    taken_back = sample.taken_back()
    state = state_after(sample.run_start(), *([taken_back] * 500), *(ev.RunNote(text=str(n)) for n in range(9)))
    text = "\n".join(picture(state_after(sample.run_start(), sample.step(1), *([taken_back] * 500))))
    assert "(500 times)" in text
    assert len(state.notices) == 10


def test_only_what_failed_in_the_same_way_is_counted_together() -> None:
    reasons = ["sent nothing for 5.1 s", "lost its connection", "sent nothing for 12 s", "lost its connection"]
    lost = [ev.GuestLost(**sample.LAPTOP, step=2, reason=reason, samples_taken_back=0) for reason in reasons]
    text = "\n".join(picture(state_after(sample.run_start(), sample.step(1), *lost), 120))
    assert "(2 times) laptop (10.0.0.7) sent nothing for 12 s" in text
    assert "(2 times) laptop (10.0.0.7) lost its connection" in text


def test_a_notice_has_one_step_number_and_it_is_its_own() -> None:
    late, joined = sample.taken_back(step=3), sample.joined("pi")
    text = "\n".join(picture(state_after(sample.run_start(), sample.step(2), late, joined), 120))
    assert "! step 3  laptop (10.0.0.7) was late; its 8 samples were taken back" in text
    assert "✓ step 3  pi (10.0.0.7) joined" in text, "in the step that is under way"
    text = "\n".join(picture(state_after(sample.run_start(), sample.step(4), joined), 120))
    assert "✓ step 4  pi (10.0.0.7) joined" in text, "there is no step after the last"


@pytest.mark.parametrize("width", [50, 80, 100])
def test_what_went_wrong_is_not_cut_at_the_terminals_width(width: int) -> None:
    reason = f"a different model: layers.0.weight is (512, 256) there and (512, 128) here; {'/long/path' * 12} end"
    refused = ev.GuestRefused(machine="東京のノート", address="10.0.0.7", reason=reason)
    state = state_after(sample.run_start(), sample.step(1), refused)
    lines = picture(state, width, 40)
    assert all(cell_len(line) <= width for line in lines)
    text = "".join(line.strip() for line in lines)
    assert f"refused 東京のノート (10.0.0.7): {reason}".replace(" ", "") in text.replace(" ", "")


def test_what_takes_more_lines_than_there_are_keeps_its_beginning() -> None:
    refused = ev.GuestRefused(machine="laptop", address="", reason="it " * 90)
    lines = picture(state_after(sample.run_start(), sample.step(1), refused), 40, 12)
    assert len(lines) <= 12
    assert any("refused laptop" in line for line in lines)


def test_a_resumed_run_says_where_it_goes_on_and_why_there() -> None:
    path = "checkpoints/step-00000263"
    damaged = ev.CheckpointDamaged(path=path, reason="its hash differs", resumed_from=180)
    lines = picture(state_after(damaged, sample.run_start(steps=300, resumed_from=180)), 120)
    words = "checkpoints/step-00000263 is damaged: its hash differs; continues after step 180"
    assert f" ✗ {words}" in lines
    assert " · resumed after step 180" in lines
    assert not any("resumed" in line for line in picture(state_after(sample.run_start())))


def test_a_name_with_markup_is_only_a_name() -> None:
    state = state_after(sample.run_start(), sample.step(1, machines=[sample.host(name="[red]x[/]")]))
    assert "[red]x[/]" in "\n".join(picture(state))


def test_history_is_bounded_and_keeps_the_shape() -> None:
    history = History(capacity=64)
    for n in range(10_000):
        history.append(float(n))
    assert 32 <= len(history.values) <= 64
    assert history.values == sorted(history.values)
    assert history.values[0] < 300
    assert history.values[-1] > 9_400


def test_lines_are_cut_by_columns_not_characters() -> None:
    assert cut("東京都", 4) == "東 …"
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"
    line = Line("abc", "bold").add("def").cropped(4)
    assert line.plain == "abc…"
    assert Line("abc").add("def").cropped(3).plain == "ab…"
    assert line.width == 4


class TestTerminal:
    def view(self, *, refresh: bool = False, **console: object) -> tuple[LiveView, io.StringIO]:
        stream = io.StringIO()
        settings = {"width": 80, "height": 24, "force_terminal": True, **console}
        return LiveView(stream, console=Console(file=stream, **settings), refresh=refresh), stream  # type: ignore[arg-type]

    def test_it_draws_and_gives_the_terminal_back(self) -> None:
        view, stream = self.view()
        for event in sample.whole_run():
            view.event(event)
        view.close()
        text = stream.getvalue()
        assert "finished after step 4, 4.20 s" in text
        assert "run folder: runs/1115-gpt" in text
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # cursor hidden, cursor shown

    def test_nothing_happens_after_close(self) -> None:
        view, stream = self.view()
        view.event(sample.run_start())
        view.close()
        before = stream.getvalue()
        view.close()
        view.event(sample.step(1))
        assert stream.getvalue() == before

    def test_a_run_that_never_started_leaves_the_terminal_alone(self) -> None:
        view, stream = self.view()
        view.close()
        assert stream.getvalue() == ""

    def test_what_goes_wrong_before_the_first_picture_is_a_line(self) -> None:
        screen = io.StringIO()
        view = LiveView(screen, refresh=False)
        view.event(ev.LoopAwaited(what="job.py", seconds=60.0, guests=1))
        shown = screen.getvalue()
        assert "! job.py has not reached run.steps() after 1 min 00 s: 1 guest waits until it does" in shown
        view.close()

    def test_no_color(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        view, stream = self.view()
        for event in sample.whole_run():
            view.event(event)
        view.close()
        assert "\x1b[32m" not in stream.getvalue()
        assert ";32m" not in stream.getvalue()

    def test_its_thread_ends_and_prints_of_others_stay_visible(self, capsys: pytest.CaptureFixture[str]) -> None:
        before = threading.active_count()
        view, stream = self.view(refresh=True)
        view.event(sample.run_start())
        print("a print of the user's script")
        view.close()
        assert "a print of the user's script" in stream.getvalue()
        deadline = time.monotonic() + 2
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == before

    def test_an_event_costs_training_next_to_nothing(self) -> None:
        view, _ = self.view()
        view.event(sample.run_start())
        events = [sample.step(n) for n in range(500)]
        begun = time.thread_time()
        for event in events:
            view.event(event)
        spent = time.thread_time() - begun
        view.close()
        assert spent / len(events) < 0.001


def test_machines_that_come_under_ever_new_names_do_not_fill_the_memory() -> None:
    hellos = [ev.GuestHello(machine=f"rogue-{n}", address="10.0.0.7", device="cpu") for n in range(500)]
    state = state_after(sample.run_start(), *hellos)
    assert len(state.machines) == 128
    state.fold(sample.step(1))
    assert len(state.machines) < 10


def test_the_table_shows_how_many_samples_are_computed_at_once() -> None:
    machines = [sample.host(24, micro_batch=12), sample.machine("laptop", 8, micro_batch=None)]
    lines = picture(state_after(sample.run_start(), sample.step(1, machines=machines)), 110, 30)
    header = next(line for line in lines if "at once" in line)
    column = header.index("at once") + len("at once")
    rows = lines[lines.index(header) + 1 :][:2]
    assert [row[:column].split()[-1] for row in rows] == ["12", "–"]


def test_the_last_picture_has_the_speed_of_the_whole_run() -> None:
    """As the line that ends a plain view, and as the report."""
    end = sample.run_end(samples_per_s=50.0, speedup=1.7)
    (speed,) = [line for line in picture(state_after(*sample.whole_run()[:-1], end)) if line.startswith(" speed")]
    assert speed.split("  ")[1:] == ["50.0 samples/s", " 1.70× this machine alone"]
