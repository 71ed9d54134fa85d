"""The results of a sweep for people: a table of the trials, the best first, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from potluck.report.line import Line
from potluck.report.plot_style import COMPUTE, FAULT, GREY, INK, PALE, new_figure
from potluck.report.table import table_lines
from potluck.sweep.spec import TrialResult, ranked, text
from potluck.units import seconds_text


def table(results: Sequence[TrialResult], metric: str, mode: str) -> list[Line]:
    """A row for each trial: the best first, those that failed last."""
    names = list(dict.fromkeys(name for result in results for name in result.parameters))
    header = ["trial", *names, metric, "steps", "time", "host", "guests", ""]
    rows = []
    for result in ranked(results, metric, mode):
        parameters = [_word(result, name) if name in result.parameters else "" for name in names]
        value = _shown(result.metrics[metric]) if metric in result.metrics else "-"
        where = " → ".join(result.machines)
        error = f"failed: {result.error[:200]}" if result.error else ""
        duration = seconds_text(result.seconds)
        rows.append(
            [result.trial, *parameters, value, str(result.steps), duration, where, ", ".join(result.guests), error]
        )
    return table_lines(header, rows, right=range(1, 4 + len(names)))


def _word(result: TrialResult, name: str) -> str:
    """A parameter as the user wrote it."""
    return result.given.get(name, text(result.parameters[name]))


def _shown(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"


def plot(path: Path, results: Sequence[TrialResult], metric: str, title: str) -> None:
    """Plots of the metric against each parameter, side by side."""
    names = list(dict.fromkeys(name for result in results for name in result.parameters))
    figure = new_figure(max(4.0, 3.2 * len(names)), 3.4)
    for number, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), number + 1)
        points = [r for r in results if r.metrics.get(metric) is not None and name in r.parameters]
        values = [r.parameters[name] for r in points]
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        numeric = len(numbers) == len(values)
        labels = sorted({_word(r, name) for r in points})
        places = numbers if numeric else [float(labels.index(_word(r, name))) for r in points]
        colours = [FAULT if r.error else COMPUTE for r in points]
        heights = [float(r.metrics[metric] or 0.0) for r in points]
        axes.scatter(places, heights, c=colours, s=28, zorder=2)
        if not numeric:
            axes.set_xticks(range(len(labels)), labels)
        elif numbers and min(numbers) > 0 and max(numbers) >= 10 * min(numbers):
            axes.set_xscale("log")
        axes.set_xlabel(name, color=INK)
        if number == 0:
            axes.set_ylabel(metric, color=INK)
        axes.grid(True, color=PALE, linewidth=0.6)
        axes.tick_params(colors=GREY)
    figure.suptitle(title, color=INK, fontsize=11)
    figure.tight_layout()
    part = path.with_name(f".{path.name}.part{path.suffix}")
    figure.savefig(part, dpi=150)
    part.replace(path)
