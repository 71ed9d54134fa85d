"""What the page shows: the report's figures, curves whose extremes survive, and nothing that becomes markup."""

from __future__ import annotations

import html
import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.balance import leases
from potluck.lab import rigs
from potluck.report.lab_table import cells_of
from potluck.report.rows import lab_row, run_row
from potluck.report.summary import summarize
from potluck.report.summary_text import machine_cells, summary_facts
from potluck.spec import events as ev
from potluck.spec.events import RunEvent
from potluck.web.curves import Series
from potluck.web.document import document, frame, state_of
from potluck.web.follower import Follower
from potluck.web.lab_page import lab_page
from potluck.web.metrics import Status, metrics_text, status_of
from potluck.web.state import GuestAbout, GuestNow, PageState, Pulse
from support import lab_outcomes
from support import sample_events as sample

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=300)


@given(VALUES, st.integers(1, 20))
def test_a_shortened_curve_keeps_its_extremes_its_mean_and_its_ends(values: list[float | None], half: int) -> None:
    series = Series(1, most=2 * half)
    for step, value in enumerate(values, 1):
        series.add(step, step / 2, (value,))
    assert len(series.rows) <= 2 * half
    assert series.rows[-1][0] == len(values)
    known = [float(f"{value:.5g}") for value in values if value is not None]
    rows = [row[2:] for row in series.rows if row[2] is not None]
    assert bool(known) == bool(rows)
    if known:
        assert min(low for low, _, _ in rows if low is not None) == min(known)
        assert max(high for _, high, _ in rows if high is not None) == max(known)
        for low, high, mean in rows:
            assert low is not None
            assert high is not None
            assert mean is not None
            assert low - 1e-3 * abs(low) <= mean <= high + 1e-3 * abs(high)


def test_the_figures_are_those_of_the_report() -> None:
    events = [*long_run(300), sample.run_end(step=300)]
    page = state_of(events, 1.1).page()
    summary = msgspec.structs.replace(summarize(events), planned_s=1.1)
    assert page.facts == tuple(summary_facts(summary))
    assert page.table == tuple(machine_cells(summary.machines))
    assert page.facts is not None
    assert dict(page.facts)["gain"] == "1.25× ± 0.01 the host alone"
    assert page.status == "finished"


def test_a_log_that_grows_and_is_resumed_is_followed(tmp_path: Path) -> None:
    events: list[RunEvent] = [sample.run_start(), *(sample.step(n, t_s=float(n)) for n in range(1, 5))]
    again: list[RunEvent] = [sample.run_start(resumed_from=2), sample.step(3, t_s=1.0, loss=9.0)]
    folder = sample.write(tmp_path / "run", events[:3], tail='{"event":"st')
    path = folder / "events.jsonl"
    follower = Follower(path, PageState)
    while follower.read():
        pass
    assert follower.state.summary().steps == 2
    with path.open("ab") as file:  # the half line stays, as after a crash; the log begins a new one
        file.write(b"\n" + b"".join(ev.to_json(e) + b"\n" for e in (*events[3:], *again)))
    while follower.read():
        pass
    assert follower.state.summary() == summarize([*events, *again])
    assert follower.state.summary().last_loss == 9.0
    assert follower.state.page().curves is not None
    assert [row[0] for row in follower.state.curves.rows] == [1, 2, 3]
    assert follower.state.curves.rows[-1][1] == 5.0  # after the 4 s of the first process
    # A server that is started for the resumed run reads the same.
    fresh = Follower(path, PageState)
    while fresh.read():
        pass
    assert fresh.state.page() == follower.state.page()


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_is_resumed_is_neither_over_nor_training_until_it_starts(tmp_path: Path, ended: bool) -> None:
    steps = [sample.joined(), sample.step(1), sample.step(2)]
    end = [sample.run_end(step=2, reason="interrupted")] if ended else []
    path = sample.write(tmp_path / "run", [sample.run_start(), *steps, *end]) / "events.jsonl"
    follower = Follower(path, PageState, before=path.stat().st_size)
    while follower.read():
        pass
    page = follower.state.page(live=True)
    assert (page.status, page.over, page.since_step_s) == ("resuming", False, None)
    assert "2 of 4, resuming; " in dict(page.facts or ())["steps"]
    assert [(m.name, m.state) for m in page.machines or ()] == [("tower", "starting"), ("laptop", "gone")]
    assert status_of(follower.state).state == "resuming"
    with path.open("ab") as file:
        file.write(ev.to_json(sample.run_start(resumed_from=1)) + b"\n")  # step 2 is repeated: it is all read again
    while follower.read():
        pass
    assert follower.state.page(live=True).status == "training"
    assert follower.state.summary().steps == 1


def test_a_run_that_is_resumed_in_vain_ended_as_it_had(tmp_path: Path) -> None:
    events = [sample.run_start(), sample.step(1), sample.run_end(step=1, reason="interrupted")]
    path = sample.write(tmp_path / "run", events) / "events.jsonl"
    follower = Follower(path, PageState, before=path.stat().st_size)
    while follower.read():
        pass
    follower.state.stop()
    assert follower.state.page(live=True).status == "interrupted"


def test_who_left_is_still_shown_and_who_comes_back_is_shown_once() -> None:
    state = PageState()
    lost = ev.GuestLost(**sample.LAPTOP, reason="sent nothing for 5.1 s", step=2, samples_taken_back=8)
    alone = sample.step(2, machines=[sample.host(32)])
    for event in (sample.run_start(), sample.joined(), sample.step(1), lost, alone):
        state.fold(event)
    gone = next(m for m in state.page().machines or () if m.name == "laptop")
    assert (gone.state, gone.reason, gone.samples) == ("gone", "sent nothing for 5.1 s", 0)
    for event in (sample.joined(), sample.step(3)):
        state.fold(event)
    assert [(m.name, m.state) for m in state.page(live=True).machines or ()] == [
        ("tower", "computing"),
        ("laptop", "computing"),
    ]


def test_names_without_end_do_not_fill_the_page() -> None:
    state = PageState()
    state.fold(sample.run_start())
    for number in range(500):
        state.fold(sample.joined(f"guest-{number}"))
        state.fold(ev.GuestLeft(machine=f"guest-{number}", address="", reason="x", step=1, samples_taken_back=0))
        state.fold(sample.step(number + 1, machines=[sample.host(32)]))
    assert len(state.page().machines or ()) < 32
    assert len(state.page().notices or ()) == 200
    assert state.page().more_notices == 800


def test_a_pulse_says_what_a_guest_does_now() -> None:
    now = 100.0
    state = PageState(clock=lambda: now)
    for event in (sample.run_start(), sample.joined(), sample.step(1)):
        state.fold(event)
    state.hear(Pulse(guests={"laptop": GuestNow(state="late", doing="has 8 samples to compute", heard_s=1.5)}))
    now += 2
    row = (state.page().machines or ())[1]
    assert (row.state, row.reason, row.heard_s) == ("late", "has 8 samples to compute", 3.5)


def test_a_guests_timeline_lies_where_it_was_measured() -> None:
    guest = sample.machine("laptop", 8, busy=0.5, receive_s=0.2, send_s=0.1, answered_s=0.9)
    state = state_of([sample.run_start(), sample.step(1, machines=[sample.host(busy=0.9), guest])])
    (step,) = state.page().steps or ()
    bars = {bar.kind: (bar.start_s, bar.end_s) for bar in step.rows[1].bars}
    assert bars == {
        "wait": (0, 1.0),
        "receive": (0, 0.2),
        "compute": (pytest.approx(0.3), pytest.approx(0.8)),
        "send": (pytest.approx(0.8), 0.9),
    }
    host = {bar.kind: (bar.start_s, bar.end_s) for bar in step.rows[0].bars}
    assert host["update"] == (0.96, 1.0)
    assert host["wait"] == (0.95, 0.96)


def test_waiting_for_data_is_drawn_and_is_no_prediction_of_the_plan() -> None:
    waits = [sample.step(n, data_s=0.4, machines=[sample.host(32, busy=0.5)]) for n in range(1, 20)]
    page = state_of([sample.run_start(workers=0), *waits]).page()
    (first, *_) = page.steps or ()
    assert [(bar.kind, bar.start_s, bar.end_s) for bar in first.rows[0].bars][:2] == [
        ("wait", 0, 0.4),
        ("compute", pytest.approx(0.45), pytest.approx(0.95)),
    ]
    assert page.advice
    assert "waiting for data" in page.advice[0]
    assert "plan" not in (page.advice_from or "")
    assert "plan" in (state_of([sample.run_start(), sample.step(1)]).page().advice_from or "")


def test_what_would_help_is_the_plan_of_what_was_measured() -> None:
    slow = sample.machine("laptop", 2, rate=20.0, link_bytes_per_s=2e6)
    events = [sample.run_start(), *(sample.step(n, machines=[sample.host(30), slow]) for n in range(1, 4))]
    texts = state_of(events).page().advice or ()
    assert any("for laptop" in text and " % more samples/s" in text for text in texts)
    assert not any("changes the training" in text for text in texts[:1])
    # A factor would be another one than the page's speed-up: the plan's is against its own prediction.
    assert not any("×" in text for text in texts)


def test_what_would_help_is_found_with_little_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, solved = leases._step_s, 0

    def counted(*given: Any) -> float:
        nonlocal solved
        solved += 1
        return solve(*given)

    monkeypatch.setattr(leases, "_step_s", counted)
    guests = [sample.machine(f"g{n}", 2, rate=8.0, link_bytes_per_s=5e7 if n else 2e6) for n in range(8)]
    start = msgspec.structs.replace(sample.run_start(), codec="auto", trained_parameters=10**6, global_batch=96)
    texts = state_of([start, sample.step(1, machines=[sample.host(80), *guests])]).page().advice or ()
    assert texts
    assert 0 < solved < 80  # each takes the serving process 0.1 ms and more


def test_a_guests_own_page() -> None:
    state = PageState(GuestAbout(host="tower", run="r1", name="laptop", device="cpu"))
    state.fold(ev.Delivered(step=7, samples=8, loss=1.5, compute_s=0.5, total_samples=24))
    page = state.page(live=True)
    assert page.title == "laptop helps tower"
    assert {h.label: h.value for h in page.headlines or ()} == {
        "step": "7",
        "loss": "1.5000",
        "samples/s": "16.0",
        "brought": "24",
    }
    state.fold(ev.HostGone(seconds=3.0))
    assert (state.page(live=True).status, state.page(live=True).level) == ("host gone for 3.00 s", "bad")
    state.fold(ev.HostBack())
    assert state.page(live=True).status == "in the run"
    for end in (ev.HostGone(seconds=9.0), ev.GuestEnded(samples=24, compute_s=1.0)):
        state.fold(end)
    page = state.page(live=True)
    assert (page.status, [m.state for m in page.machines or ()]) == ("left the run", ["gone", "left the run"])
    state.fold(ev.HostBack())
    assert [m.state for m in state.page(live=True).machines or ()] == ["was connected", "left the run"]


def test_the_document_is_whole_and_nothing_in_its_data_ends_its_element() -> None:
    name = "</script><script>alert(1)</script>"
    events = [sample.run_start(recipe=name), sample.joined(name), sample.step(1)]
    text = document(state_of(events).page())
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert name in json.loads(data[1])["about"]
    # No address of anything outside, but the name of SVG's namespace.
    assert set(re.findall(r"\w+://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    framed = frame(state_of(events).page())
    assert framed.count("<") == 2
    assert html.unescape(framed).count('<body class="compact">') == 1


def test_a_long_run_is_a_small_file() -> None:
    events = [*long_run(1100, guests=8), sample.run_end(step=1100)]
    assert len(document(state_of(events).page()).encode()) < 200_000


def test_metrics_are_read_by_prometheus() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    name = 'a"b\\c\u2028'
    machines = [sample.host(), sample.machine(name, 8)]
    events = [*long_run(40), sample.joined(name), sample.step(41, machines=machines)]
    state = state_of(events)
    text = metrics_text(status_of(state))
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    summary = state.summary()
    assert families["potluck_step"].samples[0].value == 41
    assert families["potluck_samples"].type == "counter"
    assert families["potluck_samples"].samples[0].value == summary.samples
    assert families["potluck_speedup_ratio"].samples[0].value == summary.speedup
    assert families["potluck_machine_up"].samples[1].labels["machine"] == 'a"b\\c'
    assert "potluck_eta_seconds" in families
    assert "potluck_planned_step_seconds" not in families  # not known: no line
    for family in families.values():
        assert family.documentation
        assert family.type in ("counter", "gauge")


RUN_NAMES = """
info state step steps_planned loss samples_total samples_per_second mean_samples_per_second step_seconds
predicted_step_seconds planned_step_seconds speedup_ratio speedup_margin_ratio efficiency_ratio recovery_ratio
eta_seconds steps_seconds_total wait_seconds_total update_seconds_total received_bytes_total sent_bytes_total
dropped_samples_total steps_not_applied_total
"""
MACHINE_NAMES = """
up share_ratio samples_total samples_per_second busy_ratio link_bytes_per_second heard_seconds
taken_back_samples_total dropped_samples_total lost_total
"""
STATUS_NAMES = """
version potluck run_id recipe state step steps loss samples samples_per_s mean_samples_per_s step_s
predicted_step_s planned_step_s speedup speedup_margin efficiency recovery eta_s seconds wait_s update_s
bytes_received bytes_sent dropped_samples not_applied machines
"""
MACHINE_STATUS_NAMES = """
name role device state reason up last_step_samples last_step_share samples_per_s busy link_bytes_per_s heard_s
samples taken_back_samples dropped_samples times_lost
"""


def test_the_names_that_programs_read_stay() -> None:
    """docs/reference/metrics.md promises them: a name here may be added to, not changed."""
    state = state_of([*long_run(40), sample.run_end(step=40)], 1.0)
    state.run.end = None
    state.hear(Pulse(guests={"guest-0": GuestNow(state="computing", doing="", heard_s=0.5)}))
    status = status_of(state)
    names = re.findall(r"^# TYPE potluck_(\S+)", metrics_text(status), re.M)
    assert names == [*RUN_NAMES.split(), *(f"machine_{name}" for name in MACHINE_NAMES.split())]
    assert list(status.__struct_fields__) == STATUS_NAMES.split()
    assert list(status.machines[0].__struct_fields__) == MACHINE_STATUS_NAMES.split()
    again = msgspec.json.decode(msgspec.json.encode(status), type=Status)
    assert (again, again.version) == (status, 1)


def test_a_guests_figures_are_its_own() -> None:
    state = PageState(GuestAbout(host="tower", run="r1", name="laptop", device="cpu"))
    state.fold(ev.Delivered(step=7, samples=8, loss=1.5, compute_s=0.5, total_samples=24))
    status = status_of(state)
    assert (status.run_id, status.step, status.loss, status.samples) == ("r1", 7, 1.5, 24)
    assert [(m.name, m.samples, m.samples_per_s) for m in status.machines] == [
        ("tower", 0, None),
        ("laptop", 24, 16.0),
    ]


def long_run(steps: int, guests: int = 1) -> list[RunEvent]:
    draws = random.Random(1)
    names = [f"guest-{n}" for n in range(guests)]
    made: list[RunEvent] = [sample.run_start(steps=steps), *(sample.joined(name, t_s=0.1) for name in names)]
    timing: dict[str, Any] = {"receive_s": 0.2, "send_s": 0.1, "answered_s": 0.9, "link_bytes_per_s": 1e7}
    for number in range(1, steps + 1):
        machines = [sample.host(24), *(sample.machine(name, 8, **timing) for name in names)]
        changes: dict[str, Any] = {"loss": draws.uniform(1, 5), "speedup": draws.gauss(1.25, 0.05)}
        changes |= {"t_s": 5.0 * number, "steps": steps, "predicted_s": draws.uniform(0.9, 1.1)}
        made.append(sample.step(number, machines=machines, **changes))
    return made


# -- the lab, and rows to share -------------------------------------------------------------------------


def test_the_labs_page_has_each_strategy_with_its_timeline() -> None:
    found, outcomes = lab_outcomes.all_of(rigs.load("home-pair"))
    page = lab_page(found, outcomes)
    assert page.table == tuple(cells_of(found))
    assert [t.title for t in page.timelines or ()] == [row.strategy for row in found.rows]
    assert len({t.seconds for t in page.timelines or ()}) == 1
    for timeline in page.timelines or ():
        assert {"compute", "wait"} <= {bar.kind for row in timeline.rows for bar in row.bars}
        assert all(0 <= b.start_s <= b.end_s <= timeline.seconds for row in timeline.rows for b in row.bars)
    assert "send" in {bar.kind for t in page.timelines or () for row in t.rows for bar in row.bars}
    assert len(document(page)) < 200_000


def test_a_row_to_share() -> None:
    events = [*long_run(40), sample.run_end(step=40)]
    header, rule, row = run_row(summarize(events), events, {"potluck": "1.0", "torch": "2.10"}).splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "cuda"
    assert cells[2] == "80 Mbit/s"
    assert cells[3] == "gpt, 10.9 M parameters, int4"
    assert cells[6].startswith("1.2")
    assert cells[8] == "potluck 1.0, torch 2.10"
    odd = run_row(summarize(events), [sample.run_start(codec="a|b")], {}).splitlines()[2]
    assert "a\\|b" in odd  # no cell breaks the table
    found, _ = lab_outcomes.all_of(rigs.load("home-pair"))
    assert "| potluck: laptop at 0.25 of its speed |" in lab_row(found)
