"""The curve of a sweep as a picture: speed-up against the value that changes, a line for each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.plan.variation import PAYS, Sweep
from potluck.report.plan_table import UNITS, strategies_of, value_text
from potluck.report.plot_style import GREY, INK, PALE, check_file, colour_of, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = {
    "link_mbit": "every machine's link, Mbit/s of payload",
    "guests": "guests",
    "batch_tokens": "tokens in a step",
    "parameters": "parameters of the model",
}


def write(path: Path, sweep: Sweep, title: str) -> None:
    """Draw to a file, which is replaced only when the picture is complete."""
    check_file(path)
    figure = new_figure(7.2, 4.2)
    axes = figure.add_axes((0.09, 0.14, 0.72, 0.70))
    values = [point.value for point in sweep.points]
    axes.plot(values, [p.ideal for p in sweep.points], color=GREY, linestyle=(0, (1, 2)), linewidth=1.4)
    ends = [(sweep.points[-1].ideal, "ideal", GREY)]
    for name in strategies_of(sweep):
        known = [(p.value, p.speedup[name]) for p in sweep.points if name in p.speedup]
        colour = colour_of(name)
        axes.plot(*zip(*known), color=colour, linewidth=2.4 if name == "potluck" else 1.6)
        ends.append((known[-1][1], name, colour))
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.14 * max(1.0, *(y for y, _, _ in ends), *(p.ideal for p in sweep.points)))
    _mark(axes, sweep)
    _label_ends(axes, values[-1], ends)
    axes.set_xlabel(_LABELS[sweep.span.variable], color=INK)
    axes.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    figure.text(0.09, 0.94, title, color=INK, fontsize=11, fontweight="bold")
    nowhere = "" if sweep.pays_from is not None else "; potluck is not worth it anywhere in this range"
    subtitle = f"speed-up against the fastest machine alone, predicted{nowhere}"
    figure.text(0.09, 0.885, subtitle, color=GREY, fontsize=8.5)
    save(figure, path)


def _mark(axes: Axes, sweep: Sweep) -> None:
    """Mark the value from which potluck is worth it."""
    at = sweep.pays_from
    if at is None or at <= sweep.span.first:
        return
    axes.plot([at], [PAYS], marker="o", color=colour_of("potluck"), markersize=6)
    axes.annotate(
        f"worth it from {value_text(sweep.span.variable, at)} {UNITS[sweep.span.variable]}",
        (at, PAYS), xytext=(6, -14), textcoords="offset points", color=INK, fontsize=8.5,
    )  # fmt: skip


def _label_ends(axes: Axes, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right ends of the lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    apart = 0.055 * (high - min(low, 0.0))
    below = float("-inf")
    for y, name, colour in sorted(ends):
        below = max(y, below + apart)
        axes.annotate(
            f"{name} {y:.2f}×", (x, below), xytext=(6, 0), textcoords="offset points", color=colour,
            fontsize=8.5, va="center", annotation_clip=False,
        )  # fmt: skip
