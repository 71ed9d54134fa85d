"""The page does not contradict itself, the report, /status.json or /metrics, in any state of a run."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from potluck.report.summary import NO_END, summarize
from potluck.report.summary_text import summary_facts
from potluck.spec import events as ev
from potluck.spec.events import RunEvent
from potluck.web.content import Page
from potluck.web.document import state_of
from potluck.web.metrics import metrics_text, status_of
from potluck.web.state import GuestNow, PageState, Pulse
from support import sample_events as sample

STATES = ("live", "report", "host gone", "finished", "interrupted", "failed", "resumed")


def events_of(state: str) -> list[RunEvent]:
    steps = [sample.step(n, t_s=2.0 + n, speedup=1.0 + n / 100, samples_per_s=30.0 + n) for n in range(1, 41)]
    events: list[RunEvent] = [
        sample.run_start(t_s=2.0, steps=50),
        sample.joined(t_s=2.5),
        *(msgspec.structs.replace(step, steps=50) for step in steps),
    ]
    if state in ("finished", "interrupted", "failed", "resumed"):
        reason = "interrupted" if state == "resumed" else state
        events.append(sample.run_end(step=40, reason=reason, seconds=41.0, t_s=43.0))
    if state == "resumed":
        events += [sample.run_start(t_s=3.0, steps=60, resumed_from=40), sample.joined(t_s=3.5)]
        events.append(sample.step(41, t_s=4.0, steps=60))
    return events


def state_after(name: str) -> PageState:
    state = state_of(events_of(name))
    if name != "report":
        state.hear(Pulse(guests={"laptop": GuestNow(state="computing", doing="", heard_s=0.5)}))
    if name in ("host gone", "finished", "interrupted", "failed"):
        state.stop()
    return state


def page_of(name: str) -> Page:
    return state_after(name).page(live=name != "report")


@pytest.mark.parametrize("name", STATES)
def test_badge_figures_machines_and_ages_tell_one_story(name: str) -> None:
    page, ended = page_of(name), name not in ("live", "resumed")
    (steps,) = (text for label, text in page.facts or () if label == "steps")
    word = {"live": "still going", "resumed": "still going", "report": NO_END}.get(name, name)
    assert f", {word}; " in steps
    assert page.status == {"live": "training", "resumed": "training", "report": NO_END}.get(name, name)
    assert page.over == ended
    assert (page.since_step_s is None) == ended
    assert {(m.heard_s is None) or m.role == "host" for m in page.machines or ()} == {ended} | {True}
    shown = {m.state for m in page.machines or ()}
    unknown = name in ("host gone", "report")
    over = "done" if name == "finished" else "stopped"
    assert shown == ({"was computing"} if unknown else {over} if ended else {"computing"})


@pytest.mark.parametrize("name", STATES)
def test_the_large_figures_are_the_reports(name: str) -> None:
    summary = summarize(events_of(name))
    facts, page = dict(summary_facts(summary)), page_of(name)
    shown = {headline.label: headline.value for headline in page.headlines or ()}
    assert shown["step"].replace(" / ", " of ") == facts["steps"].split(",")[0]
    assert facts["loss"].endswith(f"{shown['loss']} at last")
    assert facts["speed"].startswith(f"{shown['samples/s']} samples/s")
    assert facts["gain"] == f"{shown['speed-up']} the host alone"
    assert facts["efficiency"].startswith(shown["efficiency"])
    own = {label: text for label, text in page.facts or () if label != "steps"}
    assert own == {label: text for label, text in facts.items() if label != "steps"}


@pytest.mark.parametrize("name", STATES)
def test_status_and_metrics_are_the_reports(name: str) -> None:
    state, summary = state_after(name), summarize(events_of(name))
    status = status_of(state)
    assert (status.state, status.step, status.steps) == (state.status()[0], summary.steps, summary.planned_steps)
    same = ("samples", "speedup", "speedup_margin", "efficiency", "recovery", "step_s", "seconds", "wait_s")
    assert [getattr(status, field) for field in same] == [getattr(summary, field) for field in same]
    assert status.mean_samples_per_s == summary.samples_per_s
    assert (status.eta_s is None) == (name not in ("live", "report", "resumed"))
    metrics = dict(line.rsplit(" ", 1) for line in metrics_text(status).splitlines() if line[0] != "#")
    assert f'potluck_state{{state="{status.state}"}}' in metrics
    assert float(metrics["potluck_speedup_ratio"]) == summary.speedup
    assert float(metrics["potluck_samples_total"]) == summary.samples
    for machine in summary.machines:
        label = f'{{machine="{machine.name}",role="{machine.role}"}}'
        assert float(metrics[f"potluck_machine_samples_total{label}"]) == machine.samples


@pytest.mark.parametrize("name", STATES)
def test_no_event_is_later_than_the_run(name: str) -> None:
    events = events_of(name)
    late = ev.RunNote(text="the last word", t_s=events[-1].t_s)
    page, run_s = state_of([*events, late]).page(), summarize([*events, late]).run_s
    assert max(notice.t_s for notice in page.notices or ()) == pytest.approx(run_s, abs=0.1)
    assert page.curves is not None
    assert (page.curves.rows[-1][1] or 0.0) <= run_s + 0.1


def test_a_share_is_one_number_in_the_fleet_and_in_the_timeline() -> None:
    machines = [sample.host(28), sample.machine("laptop", 4)]  # 12.5 %: it rounds to 12 or to 13
    page = state_of([sample.run_start(), sample.step(1, machines=machines)]).page()
    (step,) = page.steps or ()
    assert [row.note for row in step.rows] == [machine.share for machine in page.machines or ()]


def test_who_has_not_come_back_to_a_resumed_run_is_gone_without_an_old_reason() -> None:
    idle = sample.machine("laptop", 0, state="sitting out", reason="its link is too slow", rate=None)
    events = [sample.run_start(), sample.joined(), sample.step(1, machines=[sample.host(32), idle])]
    page = state_of([*events, sample.run_end(reason="interrupted"), sample.run_start(resumed_from=1)]).page()
    (laptop,) = (machine for machine in page.machines or () if machine.name == "laptop")
    assert (laptop.state, laptop.reason) == ("gone", "")


def test_a_plan_is_compared_with_what_it_planned() -> None:
    alone = [sample.run_start(), sample.step(1, machines=[sample.host(32)])]
    for events, planned in ((alone, 2.0), ([*alone, sample.step(2)], 1.0)):
        state = PageState(planned_s=1.0, planned_alone_s=2.0)
        for event in events:
            state.fold(event)
        assert state.summary().planned_s == planned


def test_a_run_that_has_not_begun_shows_no_figures() -> None:
    page = PageState().page(live=True)
    assert not page.facts
    assert not page.table
    assert page.about


def odd(value: Any) -> list[Any]:
    """Values that an event may hold instead of this one."""
    match value:
        case bool() | None:
            return []
        case int() | float():
            return [0, -1, 10**15, 1e300]
        case str():
            return ["", "\u202e<b>\x00", "x" * 5000]
        case tuple() | list():
            return [[]]
        case dict():
            return [{}]
    return []


def test_no_event_however_odd_ends_the_page() -> None:
    base = [ev.to_json(event) for event in (sample.run_start(), sample.joined(), sample.step(1), sample.step(2))]
    every = [
        *sample.news(),
        *sample.quiet(),
        sample.run_start(),
        sample.step(3),
        sample.run_end(),
        sample.sits_out(),
    ]
    tried = 0
    for event in every:
        plain = msgspec.json.decode(ev.to_json(event))
        machine = plain.get("machines", [{}])[0]
        for key in [*plain, *(f"machines.{key}" for key in machine)]:
            name = key.removeprefix("machines.")
            for value in odd(machine[name] if "." in key else plain[key]) if key != "event" else []:
                changed = {**plain, "machines": [{**machine, name: value}]} if "." in key else {**plain, key: value}
                try:
                    found = ev.from_json(msgspec.json.encode(changed))
                except (msgspec.ValidationError, msgspec.DecodeError):
                    continue  # the follower leaves it out
                tried += 1
                state = state_of([ev.from_json(line) for line in base])
                state.fold(found)
                state.fold(sample.step(9))
                text = msgspec.json.encode(state.page(live=True)).decode() + metrics_text(status_of(state))
                assert not re.search(r"\x00|\u202e", text)
    assert tried > 200
