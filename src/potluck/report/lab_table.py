"""The results of strategies on a rig, as a table for a terminal or a pipe. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from potluck.report.line import BEST, LABEL, Line
from potluck.report.screen import columns, paragraph, show
from potluck.report.table import table_lines
from potluck.report.text import clean
from potluck.spec.results import Aftermath, Results, Row
from potluck.units import UNKNOWN, rate_text

_INDENT = 14


@dataclass(frozen=True, slots=True)
class _LabColumn:
    header: str
    text: Callable[[Row], str]


_COLUMNS = (
    _LabColumn("strategy", lambda row: clean(row.strategy, 24)),
    _LabColumn("s/step", lambda row: _number(row.step_s, 2 if (row.step_s or 0) >= 10 else 3)),
    _LabColumn("predicted", lambda row: _number(row.predicted_s, 2 if (row.predicted_s or 0) >= 10 else 3)),
    _LabColumn("speed-up", lambda row: _number(row.speedup, 3)),
    _LabColumn("efficiency", lambda row: _number(row.efficiency, 3)),
    _LabColumn("recovery", lambda row: _number(row.recovery, 2)),
    _LabColumn("MB/step", lambda row: _number(None if row.bytes_per_step is None else row.bytes_per_step / 1e6, 2)),
    _LabColumn("loss", lambda row: _number(row.loss, 3)),
)
HEADER = tuple(column.header for column in _COLUMNS)
_MEANINGS = (
    ("predicted", "seconds a step that `potluck plan` predicts from the rig"),
    ("speed-up", "the time of a step of the host alone ÷ the strategy's"),
    ("efficiency", "samples/s ÷ the sum of what each machine reaches alone"),
    ("recovery", "(speed-up − 1) ÷ (ideal − 1): the share of the guests' speed that was gained"),
    ("MB/step", "what crossed the host's link in a step, both ways together"),
)


def show_results(results: Results, stream: TextIO) -> None:
    """Write the table: colours on a terminal, plain text in a pipe."""
    show(results_lines(results, columns()), stream)


def results_lines(results: Results, width: int) -> list[Line]:
    """The table and remarks for its readers."""
    cells = cells_of(results)
    best = best_row(results.rows)
    styles = {number: BEST for number, row in enumerate(results.rows) if row is best}
    right = range(1, len(HEADER))
    lines = [_title(results), Line(), *table_lines(HEADER, cells, right=right, styles=styles), Line()]
    for label, text in facts_of(results):
        lines += paragraph(text, width, label=label, indent=_INDENT)
    lines.append(Line())
    for label, text in _MEANINGS:
        lines += paragraph(text, width, LABEL, label=label, indent=_INDENT)
    return [line.trimmed().cropped(max(width, 80)) for line in lines]


def cells_of(results: Results) -> list[tuple[str, ...]]:
    """A row for each strategy, as `HEADER` names its cells."""
    return [tuple(column.text(row) for column in _COLUMNS) for row in results.rows]


def facts_of(results: Results) -> list[tuple[str, str]]:
    """Remarks for readers of the table, with labels."""
    return _below(results, best_row(results.rows))


def best_row(rows: Sequence[Row]) -> Row | None:
    """The row with the largest speed-up; None if all are equally fast."""
    known = [row for row in rows if row.speedup is not None]
    return max(known, key=lambda row: row.speedup or 0.0) if len(known) > 1 else None


def _title(results: Results) -> Line:
    rig = results.rig
    title = Line(clean(rig.name, 40), "bold").add(f"   {rig.workload.steps} steps of {rig.workload.global_batch}")
    title.add(f" samples on {len(rig.machines)} machines")
    return title.add(f", {clean(results.box)}") if results.box else title


def _below(results: Results, best: Row | None) -> list[tuple[str, str]]:
    facts = []
    if best is not None and best.speedup is not None:
        facts.append(("best", f"{clean(best.strategy)}, {_faster(best.speedup)}"))
    if results.ideal_speedup is not None:
        facts.append(("ideal", f"speed-up {results.ideal_speedup:.3f}, if every machine computed all the time"))
    if results.alone:
        rates = (f"{clean(name)} {rate_text(rate, 'samples')}" for name, rate in results.alone.items())
        facts.append(("alone", f"measured: {', '.join(rates)}"))
    facts.append(("warm-up", f"the first {_steps(results.warm_up_steps)} of each strategy not counted"))
    batch = results.rig.workload.global_batch
    for row in results.rows:
        span = row.samples_per_step
        if span is not None and span != (batch, batch):
            counted = f"{span[0]}" if span[0] == span[1] else f"{span[0]} to {span[1]}"
            facts.append((clean(row.strategy), f"{counted} samples a step, not {batch}"))
    facts += [(clean(strategy), clean(note)) for strategy, note in results.notes.items()]
    return facts + (_fault_facts(results.faults) if results.faults is not None else [])


def _fault_facts(faults: Aftermath) -> list[tuple[str, str]]:
    """The injected faults and their effects."""
    struck = "; ".join(f"step {f.step}: {clean(f.machine)} {clean(f.text)}" for f in faults.applied) or "none"
    if faults.missed:
        struck += f"; {faults.missed} not applied: the run was over before"
    facts = [("faults", struck), ("guests", _losses(faults))]
    facts.append(
        ("taken back", f"{faults.taken_back_samples} samples, computed by another machine in the same step")
    )
    if faults.slowest_step_s is not None and faults.median_step_s is not None:
        ratio = faults.slowest_step_s / max(faults.median_step_s, 1e-9)
        slowest = f"{faults.slowest_step_s:.2f} s (step {faults.slowest_step}), {ratio:.2f} times the median"
        facts.append(("slowest step", f"{slowest} of {faults.median_step_s:.2f} s"))
    return facts


def _losses(faults: Aftermath) -> str:
    if not faults.lost and not faults.rejoined:
        return "none was lost"
    words = []
    for name in dict.fromkeys((*faults.lost, *faults.rejoined)):
        words.append(f"{clean(name)} lost {faults.lost.get(name, 0)}×, back {faults.rejoined.get(name, 0)}×")
    absence_s = faults.longest_absence_s
    return "; ".join(words) + (f"; away for {absence_s:.1f} s at the longest" if absence_s is not None else "")


def _faster(speedup: float) -> str:
    if speedup < 0.995:
        return f"{speedup:.2f} times as fast as the host alone: nothing is gained here"
    return (
        f"{(speedup - 1) * 100:.0f} % faster than the host alone"
        if speedup > 1.005
        else "as fast as the host alone"
    )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _number(value: float | None, digits: int) -> str:
    # What is not a number is unequal to itself.
    return UNKNOWN if value is None or value != value else f"{round(value, digits) + 0.0:.{digits}f}"
