"""The rows of `potluck bench ddp` from several machines as one Markdown table and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.report.plot_style import COMPUTE, GREY, INK, PALE, SEND, new_figure, save
from potluck.spec.ddp_rows import DdpRow, trained
from potluck.units import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEAD = ("", "device", "backend", "tokens/s", "all-reduce, computed", "all-reduce, measured", "loss")
_LOG_FROM = 20
"""From this ratio of the fastest to the slowest row on, the axis of the picture is logarithmic."""


def markdown(rows: Sequence[DdpRow]) -> list[str]:
    """The table, followed by what was trained and the difference of the losses."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|---|" + "---:|" * 4]
    for row in rows:
        times = [seconds_text(value) for value in (row.computed_s, row.all_reduce_s)]
        cells = [row.label, row.device.replace("|", "/"), row.backend, f"{row.tokens_per_s:,.0f}", *times]
        lines.append("| " + " | ".join([*cells, f"{row.loss:.5f}"]) + " |")
    losses = [row.loss for row in rows]
    apart = max(losses) - min(losses)
    what = f"GPT of {rows[0].task}; {rows[0].gradient_bytes / 1e6:.1f} MB of gradients."
    return [*lines, "", f"{what} The losses differ by at most {apart:.2g}."]


def draw(path: Path, rows: Sequence[DdpRow]) -> None:
    """Draw tokens/s of each row, and beside it the all-reduce, computed and measured."""
    figure = new_figure(8.4, 1.5 + 0.5 * len(rows))
    top, bottom = 1 - 0.85 / figure.get_figheight(), 0.5 / figure.get_figheight()
    names = [_name(row, rows) for row in rows]
    places = range(len(rows))
    speed = figure.add_axes((0.17, bottom, 0.36, top - bottom))
    rates = [row.tokens_per_s for row in rows]
    speed.barh(places, rates, color=COMPUTE, height=0.6)
    if max(rates) > _LOG_FROM * min(rates):
        speed.set_xscale("log")
        speed.set_xlim(min(rates) / 3, max(rates) * 6)
    else:
        speed.set_xlim(0, max(rates) * 1.3)
    for place, rate in zip(places, rates):
        _write(speed, rate, place, f"{rate:,.0f}")
    speed.set_yticks(places, names)
    wire = figure.add_axes((0.6, bottom, 0.36, top - bottom), sharey=speed)
    measured, computed = [r.all_reduce_s or 0.0 for r in rows], [r.computed_s or 0.0 for r in rows]
    wire.barh([p - 0.17 for p in places], computed, color=GREY, height=0.3, label="computed")
    wire.barh([p + 0.17 for p in places], measured, color=SEND, height=0.3, label="measured")
    wire.set_xlim(0, max([*measured, *computed, 1e-6]) * 1.35)
    for place, row in zip(places, rows):
        if row.all_reduce_s is not None:
            _write(wire, max(row.all_reduce_s, row.computed_s or 0.0), place, seconds_text(row.all_reduce_s))
    wire.legend(frameon=False, fontsize=8, loc="upper right")
    wire.tick_params(labelleft=False)
    speed.invert_yaxis()
    for axes, title in ((speed, "tokens/s"), (wire, "all-reduce of the gradients, seconds")):
        axes.set_title(title, fontsize=9, color=INK, loc="left")
        axes.tick_params(colors=INK, labelsize=8.5, left=False)
        axes.grid(True, axis="x", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.text(0.02, 1 - 0.3 / figure.get_figheight(), f"GPT of {trained(rows)}", color=INK, fontweight="bold")
    save(figure, path)


def _name(row: DdpRow, rows: Sequence[DdpRow]) -> str:
    """The label, with the backend if it is needed to distinguish two rows."""
    twins = sum(other.label == row.label for other in rows)
    return f"{row.label}, {row.backend}" if twins > 1 else row.label


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK,
        annotation_clip=False,
    )  # fmt: skip
