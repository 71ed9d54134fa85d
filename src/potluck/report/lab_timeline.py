"""The timeline: what every machine did in a few steps, strategy by strategy, all on one time scale.

There are thousands of intervals: neighbours are joined first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.report.line import cut
from potluck.report.plot_style import COMPUTE, FAULT, GREY, GROUND, INK, RECEIVE, SEND, WAIT, colour_of, new_figure
from potluck.spec.outcome import Interval, Outcome
from potluck.spec.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_MACHINES = 8
_ROW_IN = 0.44
_HEAD_IN = 0.52
_GAP_IN = 0.26
_TOP_IN = 0.86
_BOTTOM_IN = 0.62
_WIDTH_IN = 11.0
_RIGHT_IN = 1.15
_MOST_NAME = 24
# In a row of height 1: middle and height of each track, upwards.
_TRACKS = {"compute": (0.0, 0.40, COMPUTE), "send": (0.30, 0.13, SEND), "receive": (-0.30, 0.13, RECEIVE)}
_ROW_PART = 0.84


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """One strategy's part of the picture: the time of its run that is shown."""

    outcome: Outcome
    row: Row
    machines: tuple[str, ...]
    start: float
    """Start of the window, by the box's clock."""
    seconds: float
    """Its length, the same for all strategies."""


def draw_timeline(results: Results, outcomes: Sequence[Outcome]) -> Figure | None:
    """A row per machine: computing or waiting in the middle, sending above it, receiving below."""
    groups = windows(results, outcomes)
    if not groups:
        return None
    window_s = groups[0].seconds
    inner = sum(_HEAD_IN + _ROW_IN * len(g.machines) for g in groups) + _GAP_IN * (len(groups) - 1)
    height = _TOP_IN + inner + _BOTTOM_IN
    left = max(1.25, 0.4 + 0.085 * min(_MOST_NAME, max(len(name) for g in groups for name in g.machines)))
    figure = new_figure(_WIDTH_IN, height)
    axes = figure.add_axes(
        (
            left / _WIDTH_IN,
            _BOTTOM_IN / height,
            1 - (left + _RIGHT_IN) / _WIDTH_IN,
            inner / height,
        )
    )
    axes.set_xlim(0, window_s)
    axes.set_ylim(inner, 0)  # in inches from the top
    top = 0.0
    for group in groups:
        _draw_group(axes, group, top, window_s, results.warm_up_steps)
        top += _HEAD_IN + _ROW_IN * len(group.machines) + _GAP_IN
    _frame(axes)
    _head(figure, results, height)
    return figure


# -- what is shown --------------------------------------------------------------------------------------


def windows(results: Results, outcomes: Sequence[Outcome]) -> list[TimelineWindow]:
    """The shown window of each strategy that has a timeline."""
    rows = {row.strategy: row for row in results.rows}
    shown = [o for o in outcomes if o.intervals and len(o.steps) > 1 and o.strategy in rows]
    if not shown:
        return []
    window_s = window_length([_step_s(outcome, results.warm_up_steps) for outcome in shown])
    window_s = max([window_s, *(faults_length(outcome, results.warm_up_steps) for outcome in shown)])
    order = [machine.name for machine in results.rig.machines]
    return [
        TimelineWindow(
            outcome=outcome,
            row=rows[outcome.strategy],
            machines=_machines(outcome, order),
            start=window_start(outcome, window_s, results.warm_up_steps),
            seconds=window_s,
        )
        for outcome in shown
    ]


def window_length(step_s: Sequence[float]) -> float:
    """Long enough for one step of the slowest strategy, unless the fastest makes too many in that time."""
    return max(2.5 * min(step_s), min(1.12 * max(step_s), 8 * min(step_s)))


def faults_length(outcome: Outcome, warm_up: int) -> float:
    """Long enough for all faults and their effects, unless that would be too many steps."""
    if not outcome.faults:
        return 0.0
    step_s = _step_s(outcome, warm_up)
    span_s = max(f.end for f in outcome.faults) - min(f.start for f in outcome.faults)
    return min(span_s + 3 * step_s, 16 * step_s)


def window_start(outcome: Outcome, window_s: float, warm_up: int) -> float:
    """The start of the step at which the window is nearest to the middle of the measured steps."""
    begins = [outcome.started_at, *(step.ended_at for step in outcome.steps[:-1])]
    end = outcome.steps[-1].ended_at
    if outcome.faults:  # they are what people want to see, in the warm-up too
        struck = min(fault.start for fault in outcome.faults)
        return max((b for b in begins if b <= struck), default=begins[0])
    first = begins[min(warm_up, len(begins) - 1)]
    wanted = (first + end) / 2 - window_s / 2
    inside = [b for b in begins if b >= first and b + window_s <= end + 1e-9] or [first]
    return min(inside, key=lambda b: abs(b - wanted))


def joined(intervals: Iterable[Interval], start: float, end: float, blur_s: float) -> list[tuple[float, float]]:
    """The parts of the intervals inside the window, relative to its start; gaps too small to see are closed."""
    merged: list[list[float]] = []
    for begin, stop in sorted((max(i.start, start), min(i.end, end)) for i in intervals):
        if stop <= begin:
            continue
        if merged and begin - merged[-1][1] <= blur_s:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([begin, stop])
    return [(begin - start, stop - start) for begin, stop in merged]


def busy_share(outcome: Outcome, machine: str, warm_up: int) -> float | None:
    """Share of the measured time in which a machine computed, while it was present."""
    steps = outcome.steps
    begin = steps[warm_up - 1].ended_at if 0 < warm_up < len(steps) else outcome.started_at
    end = steps[-1].ended_at
    own = [i for i in outcome.intervals if i.machine == machine and i.kind == "compute"]
    there_s = sum(stop - start for start, stop in joined(presence(outcome, machine), begin, end, 0.0))
    return sum(stop - start for start, stop in joined(own, begin, end, 0.0)) / there_s if there_s > 0 else None


def presence(outcome: Outcome, machine: str) -> list[Interval]:
    """The steps in which a machine was present."""
    begins = [outcome.started_at, *(step.ended_at for step in outcome.steps[:-1])]
    return [
        Interval(machine=machine, kind="present", start=begin, end=step.ended_at)
        for begin, step in zip(begins, outcome.steps)
        if machine in step.present
    ]


def _step_s(outcome: Outcome, warm_up: int) -> float:
    steps = outcome.steps[warm_up:] or outcome.steps
    return sum(step.step_s for step in steps) / len(steps)


def _machines(outcome: Outcome, order: Sequence[str]) -> tuple[str, ...]:
    present = {interval.machine for interval in outcome.intervals}
    return tuple(name for name in order if name in present)[:_MOST_MACHINES]


# -- drawing --------------------------------------------------------------------------------------------


def _draw_group(axes: Axes, group: TimelineWindow, top: float, window_s: float, warm_up: int) -> None:
    outcome, start = group.outcome, group.start
    until = min(window_s, outcome.steps[-1].ended_at - start)
    _draw_head(axes, group, top, window_s, until)
    for number, machine in enumerate(group.machines):
        middle = top + _HEAD_IN + (number + 0.5) * _ROW_IN
        own = [i for i in outcome.intervals if i.machine == machine]
        axes.barh(middle, until, height=_ROW_PART * _ROW_IN, color=GROUND, zorder=1)
        for kind, (offset, height, colour) in _TRACKS.items():
            bars = joined((i for i in own if i.kind == kind), start, start + until, window_s / 1500)
            low = middle - offset * _ROW_IN - height * _ROW_IN / 2
            if kind == "compute":  # a machine that is present and does not compute waits
                there = joined(presence(outcome, machine), start, start + until, 0.0)
                _bars(axes, there, low, height, WAIT)
            _bars(axes, bars, low, height, colour)
        _draw_faults(axes, group, machine, middle, until)
        name = cut(machine, _MOST_NAME)
        axes.text(-0.012 * window_s, middle, name, ha="right", va="center", fontsize=10, color=INK, clip_on=False)
        share = busy_share(outcome, machine, warm_up)
        if share is not None:
            text = f"computes {share * 100:.0f} %"
            axes.text(1.012 * window_s, middle, text, va="center", fontsize=9, color=GREY, clip_on=False)


def _draw_faults(axes: Axes, group: TimelineWindow, machine: str, middle: float, until: float) -> None:
    """A frame around the time of a machine's fault, with its description."""
    low, high = middle - _ROW_PART * _ROW_IN / 2, middle + _ROW_PART * _ROW_IN / 2
    for fault in group.outcome.faults:
        left, right = max(fault.start - group.start, 0.0), min(fault.end - group.start, until)
        if fault.machine != machine or right < left or fault.start - group.start > until:
            continue
        across, down = [left, right, right, left, left], [low, low, high, high, low]
        axes.plot(across, down, color=FAULT, linewidth=1.4, zorder=4)
        axes.text(left, low, f" {fault.kind}", va="bottom", fontsize=8, color=FAULT, zorder=5)


def _bars(axes: Axes, bars: Sequence[tuple[float, float]], low: float, height: float, colour: str) -> None:
    spans = [(begin, end - begin) for begin, end in bars]
    axes.broken_barh(spans, (low, height * _ROW_IN), color=colour, linewidth=0, zorder=2)


def _draw_head(axes: Axes, group: TimelineWindow, top: float, window_s: float, until: float) -> None:
    """The strategy's name and figures, and marks above the rows where its steps begin and end."""
    row = group.row
    figures = [f"{row.step_s:.2f} s a step"] if row.step_s is not None else []
    figures += [f"{row.speedup:.2f}× the host alone"] if row.speedup is not None and row.strategy != "solo" else []
    name = axes.annotate(
        row.strategy,
        (0, top + 0.13),
        va="center",
        fontsize=12,
        fontweight="bold",
        color=colour_of(row.strategy),
        annotation_clip=False,
    )
    axes.annotate(
        "   " + ", ".join(figures),
        (1, 0.5),
        xycoords=name,
        va="center",
        fontsize=10,
        color=INK,
        annotation_clip=False,
    )
    bottom = top + _HEAD_IN + _ROW_IN * len(group.machines)
    begin = group.outcome.started_at
    for step in group.outcome.steps:
        left, right = max(begin - group.start, 0.0), min(step.ended_at - group.start, until)
        begin = step.ended_at
        if right <= left:
            continue
        for x in {left, right} - ({until} if step.ended_at - group.start > until else set()):
            axes.plot([x, x], [top + 0.30, bottom], color=INK, linewidth=0.8, zorder=3, clip_on=False)
        if right - left > 0.09 * window_s:
            middle = (left + right) / 2
            axes.text(middle, top + 0.40, f"step {step.step}", ha="center", va="center", fontsize=8.5, color=GREY)


def _frame(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=axes.get_xlim()[1] > 5))
    axes.tick_params(axis="x", colors=GREY, labelsize=9)
    axes.set_xlabel("seconds", color=GREY, fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.spines["bottom"].set_position(("outward", 4))


def _head(figure: Figure, results: Results, height: float) -> None:
    from matplotlib.patches import Patch

    left = 0.2 / _WIDTH_IN
    title = f"{results.rig.name}: where the time goes"
    figure.text(left, 1 - 0.16 / height, title, va="top", fontsize=14, fontweight="bold", color=INK)
    struck = results.faults is not None and results.faults.applied
    about = "the middle of each run" + (", with faults: from the first one on" if struck else "")
    about += ", all on one time scale; the percentages are of the whole measured run"
    figure.text(left, 1 - 0.46 / height, about, va="top", fontsize=10, color=GREY)
    kinds = [("sends", SEND), ("computes", COMPUTE), ("receives", RECEIVE), ("waits", WAIT)]
    kinds += [("fault", FAULT)] if struck else []
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in kinds],
        loc="upper right",
        bbox_to_anchor=(1 - 0.15 / _WIDTH_IN, 1 - 0.08 / height),
        ncols=len(kinds),
        frameon=False,
        fontsize=10,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.4,
        labelcolor=INK,
    )
