"""The events of a log: each kind as JSON and back, and what a reader takes and what it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from potluck.bounds import LONGEST
from potluck.errors import RunFolderError
from potluck.spec import events as ev
from potluck.train.event_log import EventLog, events_in
from support import sample_events as sample
from support.field_docs import field_docs

EVERY = [*sample.whole_run(), *sample.news(), *sample.quiet()]


def test_the_sample_has_every_kind() -> None:
    assert {ev.kind_of(event) for event in EVERY} == ev.KINDS


@pytest.mark.parametrize("event", EVERY, ids=ev.kind_of)
def test_an_event_is_the_same_after_json(event: ev.RunEvent) -> None:
    line = ev.to_json(event)
    assert ev.from_json(line) == event
    assert json.loads(line)["event"] == ev.kind_of(event)
    assert b"\n" not in line


def test_every_field_says_what_it_is() -> None:
    for event in [*EVERY, sample.host()]:
        assert type(event).__doc__
        undocumented = set(type(event).__struct_fields__) - set(field_docs(type(event))) - {"t_s"}
        assert not undocumented, f"{type(event).__name__}: {undocumented}"


def test_numbers_that_are_not_finite_are_null_at_any_depth(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(sample.step(1, loss=math.nan, machines=(sample.host(rate=math.inf, busy=-math.inf),)))
    log.close()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    written = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=no_constant)
    assert written["loss"] is None
    assert (written["machines"][0]["rate"], written["machines"][0]["busy"]) == (None, None)
    (read,) = events_in(tmp_path / "events.jsonl")
    assert isinstance(read, ev.StepEnded)
    assert (read.loss, read.machines[0].rate) == (None, None)


def test_what_has_its_usual_value_is_not_written() -> None:
    lost = ev.GuestLost(**sample.LAPTOP, reason="is gone", step=2, samples_taken_back=0)
    assert not {"put_out", "failed", "t_s"} & set(json.loads(ev.to_json(lost)))
    assert json.loads(ev.to_json(msgspec.structs.replace(lost, put_out=True)))["put_out"] is True
    assert "loss" not in json.loads(ev.to_json(sample.run_end(loss=msgspec.UNSET)))
    assert json.loads(ev.to_json(sample.run_end(loss=None)))["loss"] is None


def test_every_written_event_has_its_time(tmp_path: Path) -> None:
    seen: list[ev.RunEvent] = []
    log = EventLog(tmp_path / "events.jsonl", seen.append)
    log.emit(ev.HostBack())
    log.close()
    assert events_in(tmp_path / "events.jsonl") == seen
    assert "t_s" in json.loads((tmp_path / "events.jsonl").read_text())


def test_a_newer_version_may_have_more_kinds_and_more_fields(tmp_path: Path) -> None:
    lines = ['{"event": "moon_phase", "phase": 3}', '{"event": "note", "text": "x", "colour": [1, {}]}']
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert events_in(tmp_path / "events.jsonl") == [ev.RunNote(text="x")]


@pytest.mark.parametrize(
    "half", ["", "{", '{"event": "note", "te', '{"event": "note"', '{"event": "note", "text": "\xe4']
)
def test_half_a_line_is_skipped_wherever_it_is(half: str, tmp_path: Path) -> None:
    whole = '{"event": "note", "text": "x"}'
    raw = f"{whole}\n{half}\n{whole}\n{half}".encode("latin-1")
    (tmp_path / "events.jsonl").write_bytes(raw)
    assert events_in(tmp_path / "events.jsonl") == [ev.RunNote(text="x")] * 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"event": "note"}', "missing required field `text`"),
        ('{"event": "note", "text": 3}', r"Expected `str`, got `int` - at `\$.text`"),
        ('{"event": "log_gap", "lines": -1}', "`int` >= 0"),
        ('{"text": "x"}', "missing required field `event`"),
        ("[1, 2]", "Expected `object`"),
    ],
)
def test_a_line_that_this_version_never_writes_is_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"event": "note", "text": "x"}}\n{line}\n')
    with pytest.raises(RunFolderError, match=why) as caught:
        events_in(path)
    assert f"{path}, line 2" in str(caught.value)
    assert caught.value.hint


def test_a_name_that_is_no_unicode_does_not_cost_the_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(ev.GuestHello(machine="a\ud800b", address="10.0.0.7", device="cpu"))
    log.close()
    (read,) = events_in(tmp_path / "events.jsonl")
    assert isinstance(read, ev.GuestHello)
    assert read.machine == "a?b"


def test_what_is_written_can_be_read_however_long_it_is(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    long = "é" * (LONGEST + 5)
    events = [
        ev.RunNote(text=long),
        ev.RunNote(text="\ud800" * LONGEST),
        ev.Logged(step=1, values={long: 1.0, "b": 2.0}),
        ev.Logged(step=1, values={str(n): 1.0 for n in range(LONGEST + 5)}),
        ev.RunNote(text="x" * (LONGEST // 2)),
    ]
    for event in events:
        log.emit(event)
    log.close()
    read = events_in(tmp_path / "events.jsonl")
    assert [type(event) for event in read] == [type(event) for event in events]
    (first, _, logged, many, last) = read
    assert isinstance(first, ev.RunNote)
    assert isinstance(logged, ev.Logged)
    assert isinstance(many, ev.Logged)
    assert isinstance(last, ev.RunNote)
    assert (len(first.text), logged.values["b"], len(many.values)) == (4096, 2.0, LONGEST)
    assert last.text == "x" * (LONGEST // 2)
