"""A run or a bench as one row of a Markdown table, for people who share results. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from potluck._version import __version__
from potluck.report.summary import Summary
from potluck.report.summary_text import gain_text
from potluck.report.text import clean
from potluck.spec.events import RunEvent, RunStarted, StepEnded
from potluck.spec.results import Results
from potluck.units import bits_text, count_text, factor_text, seconds_text

HEADER = ("host", "guests", "links", "model", "samples a step", "s/step", "speed-up", "efficiency", "versions")


def run_row(summary: Summary, events: Iterable[RunEvent], versions: Mapping[str, str]) -> str:
    """The header and the row of a real run."""
    start: RunStarted | None = None
    last: StepEnded | None = None
    links: dict[str, float] = {}
    for event in events:
        start = event if isinstance(event, RunStarted) else start
        if isinstance(event, StepEnded):
            last = event
            links |= {m.name: m.link_bytes_per_s for m in event.machines if m.link_bytes_per_s}
    host, *guests = summary.machines or (None,)
    size = f"{summary.recipe}, {count_text(summary.parameters)} parameters" + (f", {start.codec}" if start else "")
    cells = (
        host.device if host is not None else "",
        ", ".join(guest.device for guest in guests) or "none",
        ", ".join(bits_text(links.get(guest.name)) for guest in guests) or "–",
        size,
        str(start.global_batch) if start is not None else "–",
        seconds_text(summary.step_s),
        gain_text(summary.speedup, summary.speedup_margin) if last is not None else "–",
        "–" if summary.efficiency is None else f"{summary.efficiency:.3f}",
        ", ".join(f"{name} {version}" for name, version in versions.items()) or f"potluck {__version__}",
    )
    return _table([cells])


def lab_row(results: Results) -> str:
    """The header and a row for each strategy on an emulated fleet."""
    rig = results.rig
    links = ", ".join(_link(m.link_mbit) for m in rig.guests)
    speeds = ", ".join(f"{clean(m.name)} at {_relative(results, m.name)}" for m in rig.guests)
    rows = []
    for row in results.rows:
        rows.append(
            (
                f"{clean(rig.host.name)} (rig {clean(rig.name)})",
                f"{row.strategy}: {speeds}",
                links,
                str(rig.workload.recipe),
                str(rig.workload.global_batch),
                seconds_text(row.step_s),
                factor_text(row.speedup),
                "–" if row.efficiency is None else f"{row.efficiency:.3f}",
                f"potluck {__version__}, emulated ({clean(results.box)})",
            )
        )
    return _table(rows)


def _relative(results: Results, name: str) -> str:
    host, own = results.alone.get(results.rig.host.name), results.alone.get(name)
    return f"{own / host:.2f} of its speed" if host and own else "–"


def _link(mbit: float | None) -> str:
    return "unshaped" if mbit is None else f"{mbit:g} Mbit/s"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows]
    return "\n".join("| " + " | ".join(clean(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
