"""A run's summary as text for a terminal or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from potluck.report.data_wait import data_text
from potluck.report.sentences import loss_text, wire_text
from potluck.report.summary import MachineSummary, Summary
from potluck.report.table import table_lines
from potluck.report.text import clean
from potluck.units import (
    bytes_text,
    count_text,
    factor_text,
    percent_text,
    rate_text,
    seconds_text,
)

HEADER = ("machine", "role", "device", "samples", "at once", "share", "rate", "busy", "notes")
MOST_CODECS = 4
"""The most guests whose codec is shown."""


def summary_text(summary: Summary, width: int | None = None) -> str:
    """About ten lines, wrapped at this width, and a table of the machines."""
    lines = [f"{label:<12}{text}" for label, text in summary_facts(summary)]
    if width is not None:
        wrap = textwrap.TextWrapper(width, subsequent_indent=" " * 12, break_on_hyphens=False)
        lines = [part for line in lines for part in wrap.wrap(line)]
    table = _table(summary.machines)
    return "\n".join([*lines, "", *table] if table else lines)


def summary_facts(s: Summary) -> list[tuple[str, str]]:
    """Each figure with its label."""
    facts = _facts(s)
    if s.planned_s and s.step_s:
        off = s.step_s / s.planned_s - 1
        facts.append(("plan", f"{seconds_text(s.planned_s)} a step, before the run; {_came(off)}"))
    return facts


def _facts(s: Summary) -> list[tuple[str, str]]:
    size = f"{count_text(s.parameters)} parameters" if s.parameters else ""
    title = ", ".join(filter(None, (s.recipe, size)))
    facts = [("run", f"{s.run_id or 'unnamed'}" + (f" ({title})" if title else ""))]
    steps = f"{s.steps} of {s.planned_steps}" if s.planned_steps else str(s.steps)
    facts.append(("steps", f"{steps}, {s.ended}; {_durations(s)}"))
    if s.first_loss is not None or s.not_applied:
        facts.append(("loss", f"{loss_text(s.first_loss)} at first, {loss_text(s.last_loss)} at last"))
    if s.not_applied:
        facts.append(("not applied", f"{s.not_applied} of the steps: their gradient was not finite"))
    speed = [rate_text(s.samples_per_s, "samples")]
    if s.tokens_per_s is not None:
        speed.append(rate_text(s.tokens_per_s, "tokens"))
    facts.append(("speed", ", ".join(speed) + f" ({count_text(s.samples)} samples)"))
    if (waiting := data_text(s)) is not None:
        facts.append(("data", waiting))
    if len(s.machines) > 1:
        facts += _fleet_facts(s)
    if s.effective_batch is not None:
        facts.append(("batch norm", f"{s.batch_layers} layers, over {s.effective_batch:.0f} samples on average"))
    if s.dropped_samples:
        facts.append(("dropped", f"{s.dropped_samples} samples that guests had computed"))
    if s.strangers_refused:
        strangers = "stranger" if s.strangers_refused == 1 else "strangers"
        facts.append(("refused", f"{s.strangers_refused} {strangers}"))
    return facts


def _durations(s: Summary) -> str:
    """The run's time, that of its steps, and of one step: the mean, and the median if it differs."""
    text = (
        f"{seconds_text(s.run_s)}, {seconds_text(s.seconds)} of it in steps, {seconds_text(s.mean_step_s)} a step"
    )
    if s.step_s and s.mean_step_s and abs(s.step_s / s.mean_step_s - 1) > 0.05:
        text += f" (median {seconds_text(s.step_s)})"
    return text


def _fleet_facts(s: Summary) -> list[tuple[str, str]]:
    facts = []
    if s.speedup is not None:
        facts.append(("gain", f"{gain_text(s.speedup, s.speedup_margin)} the host alone"))
    if s.predicted_s is not None and s.off is not None:
        # Not beside the median of all steps: those without a prediction may have been faster or slower.
        took = f"the same steps took {seconds_text(s.foreseen_s)}, {_off(s.off)} (medians)"
        facts.append(("predicted", f"{seconds_text(s.predicted_s)} a step from the speeds measured; {took}"))
    if s.efficiency is not None:
        facts.append(("efficiency", f"{s.efficiency:.3f} of the machines' summed speed"))
    if s.recovery is not None and s.recovery < 0.005:
        facts.append(("recovery", "none of what the guests could add"))
    elif s.recovery is not None:
        facts.append(("recovery", f"{s.recovery:.2f} of what the guests could add"))
    elif s.could_add is not None:
        facts.append(("recovery", f"the guests could add almost nothing: {s.could_add:.1%} of the host's speed"))
    waited = f"{seconds_text(s.wait_s)} ({s.wait_s / s.seconds if s.seconds else 0.0:.1%} of the time)"
    facts.append(("host", f"waited {waited}, updates took {seconds_text(s.update_s)}"))
    if s.bytes_up or s.bytes_down:
        each = bytes_text((s.bytes_up + s.bytes_down) / max(s.steps, 1))
        facts.append(("wire", f"{wire_text(s.bytes_up, s.bytes_down)} ({each} a step)"))
    facts += [("codec", f"{guest}: {words}") for guest, words in list(s.codecs.items())[:MOST_CODECS]]
    if s.ahead_samples or s.unneeded_samples:
        unneeded = f"{count_text(s.unneeded_samples)} ({bytes_text(s.unneeded_bytes)}) were not needed"
        facts.append(("sent ahead", f"{count_text(s.ahead_samples)} samples before their lease; {unneeded}"))
    return facts


def gain_text(speedup: float | None, margin: float | None) -> str:
    """'1.16× ± 0.02'."""
    return factor_text(speedup) + (f" ± {max(margin, 0.005):.2f}" if margin is not None else "")


def _came(off: float) -> str:
    """The difference of the measured time from the prediction."""
    return "as it came" if abs(off) < 0.0005 else f"it took {_off(off)}"


def _off(off: float) -> str:
    return "as predicted" if abs(off) < 0.0005 else f"{abs(off):.1%} {'more' if off > 0 else 'less'}"


def _table(machines: Sequence[MachineSummary]) -> list[str]:
    if not machines:
        return []
    rows = machine_cells(machines)
    return [line.plain.rstrip() for line in table_lines(HEADER, rows, right=range(3, 8), rule=False)]


def machine_cells(machines: Sequence[MachineSummary]) -> list[tuple[str, ...]]:
    """A row for each machine, as `HEADER` names them."""
    return [
        (
            clean(m.name, 24),
            m.role,
            clean(m.device, 24),
            str(m.samples),
            str(m.micro_batch or "–"),
            percent_text(m.share),
            rate_text(m.rate),
            percent_text(m.busy),
            _notes(m),
        )
        for m in machines
    ]


def _notes(machine: MachineSummary) -> str:
    notes = []
    if machine.times_lost:
        notes.append("lost once" if machine.times_lost == 1 else f"lost {machine.times_lost} times")
    if machine.taken_back_samples:
        notes.append(f"{machine.taken_back_samples} taken back")
    if machine.dropped_samples:
        notes.append(f"{machine.dropped_samples} dropped")
    return ", ".join(notes)
