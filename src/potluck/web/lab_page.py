"""The lab's results as a page: strategies side by side, with their timelines on one time scale."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.report.lab_table import HEADER, cells_of, facts_of
from potluck.report.lab_timeline import TimelineWindow, busy_share, joined, presence, windows
from potluck.report.text import clean
from potluck.spec.outcome import Outcome
from potluck.spec.results import Results
from potluck.units import percent_text
from potluck.web.content import Bar, Page, Timeline, TimelineRow

_TRACKS = ("compute", "send", "receive")


def lab_page(results: Results, outcomes: Sequence[Outcome]) -> Page:
    rig = results.rig
    about = f"{rig.workload.steps} steps of {rig.workload.global_batch} samples on {len(rig.machines)} machines"
    return Page(
        kind="lab",
        over=True,
        title=f"{clean(rig.name)}: strategies side by side",
        about=about + (f", {clean(results.box)}" if results.box else ""),
        facts=tuple(facts_of(results)),
        header=HEADER,
        numeric=tuple(range(1, len(HEADER))),
        table=tuple(cells_of(results)),
        timelines=tuple(_timeline(window, results.warm_up_steps) for window in windows(results, outcomes)),
    )


def _timeline(window: TimelineWindow, warm_up: int) -> Timeline:
    outcome, row = window.outcome, window.row
    notes = [f"{row.step_s:.2f} s a step"] if row.step_s is not None else []
    notes += [f"{row.speedup:.2f}× the host alone"] if row.speedup is not None and row.strategy != "solo" else []
    marks = []
    for step in outcome.steps:
        at = step.ended_at - window.start
        if 0 < at <= window.seconds:
            marks.append((round(at, 4), f"step {step.step}"))
    return Timeline(
        title=clean(row.strategy),
        note=", ".join(notes),
        seconds=round(window.seconds, 4),
        marks=tuple(marks),
        rows=tuple(_row(window, name, warm_up) for name in window.machines),
    )


def _row(window: TimelineWindow, name: str, warm_up: int) -> TimelineRow:
    outcome, start, end = window.outcome, window.start, window.start + window.seconds
    bars = [Bar("wait", *_rounded(span)) for span in joined(presence(outcome, name), start, end, 0.0)]
    own = [i for i in outcome.intervals if i.machine == name]
    for kind in _TRACKS:
        spans = joined((i for i in own if i.kind == kind), start, end, window.seconds / 1500)
        bars += [Bar(kind, *_rounded(span)) for span in spans]
    for fault in outcome.faults:
        if fault.machine == name and fault.start < end and fault.end >= start:
            bars.append(Bar("fault", *_rounded((max(0.0, fault.start - start), min(fault.end, end) - start))))
    share = busy_share(outcome, name, warm_up)
    note = f"computes {percent_text(share)}" if share is not None else ""
    return TimelineRow(name=clean(name), note=note, bars=tuple(bars))


def _rounded(span: tuple[float, float]) -> tuple[float, float]:
    return round(span[0], 4), round(span[1], 4)
