"""The loss curve: as a sparkline, as a chart in the terminal, as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from potluck.report.ticks import nice_ticks, tick_texts
from potluck.sinks import guarded

BLOCKS = "▁▂▃▄▅▆▇█"
# The dots of a braille cell, by (column, row from the top).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one row of at most `width` characters; a gap where there is no finite value."""
    if width < 1 or not values:
        return ""
    means = _resampled(values, min(width, len(values)))
    finite = [v for v in means if v is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if v is None else BLOCKS[round((v - low) * scale)] for v in means)


def loss_curve_text(
    steps: Sequence[int],
    losses: Sequence[float],
    width: int = 78,
    height: int = 14,
    *,
    ascii_only: bool = False,
) -> str:
    """A chart of `width` × `height` characters with both axes; '' if there is nothing to draw.

    Long runs are smoothed, so that noise reads as a line.
    """
    points = [(s, v) for s, v in zip(steps, _smoothed(losses)) if math.isfinite(v)]
    if len(points) < 2 or points[0][0] >= points[-1][0]:
        return ""
    plot_height = max(height - 2, 3)
    low, high = min(v for _, v in points), max(v for _, v in points)
    pad = (high - low) * 0.03 or abs(high) * 0.05 or 1.0
    ticks = nice_ticks(low, high, max(2, plot_height // 2))
    labels = tick_texts(ticks)
    margin = max(len(label) for label in labels)
    plot_width = max(width - margin - 2, 8)
    columns, rows = (1, 1) if ascii_only else (2, 4)
    low, high = min([low - pad, *ticks]), max([high + pad, *ticks])
    heights = _column_heights(points, plot_width * columns, low, high, plot_height * rows)
    cells = _drawn(heights, plot_height * rows)
    at_row = {round((high - tick) / (high - low) * (plot_height - 1)): label for tick, label in zip(ticks, labels)}
    side, tee, corner = ("|", "+", "+") if ascii_only else ("│", "┤", "└")
    lines = []
    for row in range(plot_height):
        body = _row_text(cells, row, plot_width, columns, rows)
        axis = tee if row in at_row else side
        lines.append(f"{at_row.get(row, ''):>{margin}} {axis}{body}".rstrip())
    lines.append(" " * (margin + 1) + corner + ("-" if ascii_only else "─") * plot_width)
    lines.append(" " * (margin + 2) + _step_axis(points[0][0], points[-1][0], plot_width))
    return "\n".join(lines)


def write_loss_png(folder: Path, steps: Sequence[int], losses: Sequence[float]) -> None:
    """Write loss.png into a run's folder, if there is a loss. A failure is only a warning."""
    if steps:
        guarded(loss_curve_png, "loss.png")(folder / "loss.png", steps, losses, title=folder.name)


def loss_curve_png(path: Path, steps: Sequence[int], losses: Sequence[float], *, title: str = "") -> bool:
    """Write the curve as a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # Figure and canvas by hand: pyplot would keep global state and look for a display.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    smooth = _smoothed(losses)
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="each step")
    axes.plot(steps, smooth, color="#08519c", linewidth=1.8, label="smoothed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(losses) > 20:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")
    return True


def _resampled(values: Sequence[float], count: int) -> list[float | None]:
    """Means of `count` equal parts of the values; None for a part without a finite value."""
    result: list[float | None] = []
    for i in range(count):
        stretch = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [v for v in stretch if math.isfinite(v)]
        result.append(math.fsum(finite) / len(finite) if finite else None)
    return result


def _column_heights(
    points: Sequence[tuple[int, float]], columns: int, low: float, high: float, dots: int
) -> list[int | None]:
    """For each column of dots, the distance of its mean from the top, in dots."""
    first, last = points[0][0], points[-1][0]
    sums = [0.0] * columns
    counts = [0] * columns
    for step, value in points:
        column = min(int((step - first) / (last - first) * (columns - 1) + 0.5), columns - 1)
        sums[column] += value
        counts[column] += 1
    known = [(c, sums[c] / counts[c]) for c in range(columns) if counts[c]]
    result: list[int | None] = [None] * columns
    # Few steps on a wide chart: straight lines between them.
    for (left, a), (right, b) in pairwise(known):
        for column in range(left, right + 1):
            value = a + (b - a) * (column - left) / (right - left)
            result[column] = round((high - value) / (high - low) * (dots - 1))
    return result


def _drawn(heights: Sequence[int | None], dots: int) -> set[tuple[int, int]]:
    """The dots to set: each column's own, and those up to the column before it, so that no gap shows."""
    drawn: set[tuple[int, int]] = set()
    before: int | None = None
    for column, height in enumerate(heights):
        if height is not None:
            height = min(max(height, 0), dots - 1)
            drawn.add((column, height))
            if before is not None and abs(height - before) > 1:
                step = 1 if height > before else -1
                drawn.update((column, y) for y in range(before + step, height, step))
        before = height
    return drawn


def _row_text(dots: set[tuple[int, int]], row: int, width: int, columns: int, rows: int) -> str:
    if columns == 1:
        return "".join("*" if (x, row) in dots else " " for x in range(width))
    text = []
    for x in range(width):
        bits = 0
        for dx in range(2):
            for dy in range(4):
                if (x * 2 + dx, row * rows + dy) in dots:
                    bits |= _DOTS[dx][dy]
        text.append(chr(0x2800 + bits) if bits else " ")
    return "".join(text)


def _step_axis(first: int, last: int, width: int) -> str:
    left, middle, right = str(first), str((first + last) // 2), f"step {last}"
    if len(left) + len(middle) + len(right) + 4 > width:
        return left + right.rjust(max(width - len(left), len(right) + 1))
    line = left + middle.rjust(width // 2 + len(middle) // 2 - len(left))
    return line + right.rjust(width - len(line))


def _smoothed(losses: Sequence[float]) -> list[float]:
    """A mean over about a fortieth of the run, centred at the start, where the curve is steepest."""
    reach = len(losses) // 80
    result = []
    for i in range(len(losses)):
        near = min(reach, i)
        stretch = [v for v in losses[i - near : i + near + 1] if math.isfinite(v)]
        result.append(math.fsum(stretch) / len(stretch) if stretch else math.nan)
    return result
