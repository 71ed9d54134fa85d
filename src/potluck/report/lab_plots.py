"""The lab's pictures: speed-up, timeline and loss of the strategies on a rig, each as PNG and as SVG.

matplotlib is imported late: it takes longer than everything else.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.errors import UserError
from potluck.report.lab_timeline import draw_timeline
from potluck.report.plot_style import GREY, INK, PALE, colour_of, new_figure
from potluck.spec.outcome import Outcome
from potluck.spec.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_LONGEST = 4.0
"""A strategy that takes more than this many times as long as the fastest is cut off at the right."""
_LETTER_IN = 0.105


def write(out_dir: Path, results: Results, outcomes: Sequence[Outcome]) -> list[Path]:
    """Draw all pictures for which there is data. Returns the files, whose names are fixed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "plots need matplotlib, which is not installed", hint="pip install -e '.[plots]'"
        ) from error
    pictures = {
        "speedup": draw_speedup(results),
        "timeline": draw_timeline(results, outcomes),
        "loss": draw_loss(results, outcomes),
    }
    # Ids in an SVG are drawn from this salt: the same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "potluck"}):
        return [
            _save(figure, out_dir / f"{name}.{kind}", kind)
            for name, figure in pictures.items()
            if figure is not None
            for kind in ("png", "svg")
        ]


def _save(figure: Figure, path: Path, kind: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}", hint="choose another folder") from error
    return path


# -- speed-up -------------------------------------------------------------------------------------------


def draw_speedup(results: Results) -> Figure | None:
    """A bar for each strategy, a line for the host alone and one for the ideal."""
    rows = [row for row in results.rows if row.speedup is not None]
    if not rows:
        return None
    height = 1.72 + 0.5 * len(rows)
    figure = new_figure(9.0, height)
    axes = figure.add_axes((0.15, 0.6 / height, 0.69, 1 - 1.57 / height))
    longest = max([1.0, results.ideal_speedup or 1.0, *(row.speedup or 0.0 for row in rows)])
    axes.set_xlim(0, longest * 1.08)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    for place, row in enumerate(rows):
        _speedup_bar(axes, place, row, longest)
    axes.set_yticks(range(len(rows)), [row.strategy for row in rows], fontsize=11, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("times as fast as the host alone", color=GREY, fontsize=10)
    axes.tick_params(axis="x", colors=GREY, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    _upright(axes, 1.0, "the host alone ", "right", "-")
    if results.ideal_speedup is not None and len(results.rig.machines) > 1:
        ideal = f"{results.ideal_speedup:.3f}".removesuffix("0")
        _upright(axes, results.ideal_speedup, f" ideal {ideal}×", "left", (0, (4, 3)))
    rig = results.rig
    machines = " + ".join(machine.name for machine in rig.machines[:6])
    counted = f"the first {results.warm_up_steps} steps of each strategy not counted"
    _title(figure, f"{rig.name}: speed-up", f"{rig.workload.global_batch} samples a step on {machines}; {counted}")
    return figure


def _speedup_bar(axes: Axes, place: int, row: Row, longest: float) -> None:
    assert row.speedup is not None
    colour = colour_of(row.strategy)
    axes.barh(place, row.speedup, height=0.64, color=colour, zorder=2)
    inside = row.speedup > 0.16 * longest
    axes.annotate(
        f"{row.speedup:.2f}×",
        (row.speedup, place),
        xytext=(-7 if inside else 7, -0.5),
        textcoords="offset points",
        ha="right" if inside else "left",
        va="center",
        fontsize=11,
        fontweight="bold",
        color="white" if inside else INK,
        zorder=5,
        bbox={"facecolor": colour if inside else "white", "edgecolor": "none", "pad": 1.0},
    )
    if row.efficiency is not None:
        axes.annotate(
            f"efficiency {row.efficiency:.2f}",
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=10,
            color=GREY,
            annotation_clip=False,
        )


def _upright(axes: Axes, x: float, label: str, side: str, dashes: Any) -> None:
    axes.axvline(x, color=INK, linewidth=1.1, linestyle=dashes, zorder=3)
    axes.annotate(
        label, (x, 1.0), xycoords=("data", "axes fraction"), ha=side, va="bottom", fontsize=9.5, color=INK
    )


def _title(figure: Figure, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.16 / height, title, ha="left", va="top", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.02, 1 - 0.46 / height, subtitle, ha="left", va="top", fontsize=10, color=GREY)


# -- loss -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Curve:
    strategy: str
    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Label:
    """A curve's name in a row below the curves; it ends at `right_s`, below the curve's end."""

    text: str
    right_s: float
    row: int


def draw_loss(results: Results, outcomes: Sequence[Outcome]) -> Figure | None:
    """Loss against the time since training began."""
    curves = []
    for outcome in outcomes:
        points = [(s.ended_at - outcome.started_at, s.loss) for s in outcome.steps if math.isfinite(s.loss)]
        if points:
            curves.append(_Curve(outcome.strategy, [t for t, _ in points], [loss for _, loss in points]))
    if not curves:
        return None
    figure = new_figure(9.0, 5.2)
    axes = figure.add_axes((0.075, 0.115, 0.90, 0.74))
    ends = [curve.seconds[-1] for curve in curves]
    limit_s = 1.06 * min(max(ends), _LONGEST * min(ends))
    inches = figure.get_figwidth() * axes.get_position().width
    labels = place_labels([(c.strategy, c.seconds[-1]) for c in curves], limit_s, inches)
    low, high = min(min(c.losses) for c in curves), max(max(c.losses) for c in curves)
    span = (high - low) or 1.0
    axes.set_xlim(0, limit_s)
    axes.set_ylim(low - span * (0.13 + 0.075 * max(label.row for label in labels)), high + span * 0.05)
    for curve, label in zip(curves, labels):
        _draw_curve(axes, curve, label, low - span * (0.06 + 0.075 * label.row), limit_s)
    axes.set_xlabel("seconds of training", color=GREY, fontsize=10)
    axes.tick_params(colors=GREY, labelsize=9)
    axes.grid(True, axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    _title(figure, f"{results.rig.name}: loss", "each dot is a step; further left is faster")
    return figure


def place_labels(ends: Sequence[tuple[str, float]], limit_s: float, inches: float) -> list[Label]:
    """Place each label in the highest row in which it touches no other label and no line to a lower one."""
    per_second = inches / limit_s
    taken: list[list[tuple[float, float]]] = [[] for _ in ends]
    labels: dict[int, Label] = {}
    for place in sorted(range(len(ends)), key=lambda p: ends[p][1]):
        strategy, end_s = ends[place]
        text = f"{strategy}, {end_s:.0f} s" + ("" if end_s <= limit_s else " →")
        leader = min(end_s, limit_s) * per_second
        width = _LETTER_IN * (len(text) + 1)
        right = max(leader + 0.05, width)
        free = (n for n, row in enumerate(taken) if all(right < a or right - width > b for a, b in row))
        row = next(free, len(taken) - 1)
        taken[row].append((right - width, right))
        for above in taken[:row]:
            above.append((leader - 0.04, leader + 0.04))
        labels[place] = Label(text, (right - 0.05) / per_second, row)
    return [labels[place] for place in range(len(ends))]


def _draw_curve(axes: Axes, curve: _Curve, label: Label, y: float, limit_s: float) -> None:
    colour = colour_of(curve.strategy)
    axes.plot(curve.seconds, curve.losses, color=colour, linewidth=2, marker="o", markersize=3.2, zorder=3)
    end = curve.seconds[-1]
    if end <= limit_s:
        axes.plot([end], [curve.losses[-1]], marker="o", markersize=7, color=colour, zorder=4)
        axes.plot([end, end], [curve.losses[-1], y], color=colour, linewidth=0.9, linestyle=(0, (2, 2)), zorder=2)
    else:
        y = _loss_at(curve, limit_s)
    axes.annotate(
        label.text,
        (label.right_s, y),
        xytext=(3, 0 if end <= limit_s else -5),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=10,
        fontweight="bold",
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        annotation_clip=False,
        zorder=5,
    )


def _loss_at(curve: _Curve, seconds: float) -> float:
    """The point at which a curve is cut off."""
    after = bisect.bisect(curve.seconds, seconds)
    if after == 0:
        return curve.losses[0]
    (t0, t1), (a, b) = curve.seconds[after - 1 : after + 1], curve.losses[after - 1 : after + 1]
    return a + (b - a) * (seconds - t0) / (t1 - t0)
