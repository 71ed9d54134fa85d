"""A plan, a sweep and a scale as lines for a terminal or a pipe. PURE."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from potluck.plan import devices
from potluck.plan.links import LINKS
from potluck.plan.models import NAMES
from potluck.plan.scale import Scale
from potluck.plan.variation import Sweep
from potluck.report.line import BEST, LABEL, Line
from potluck.report.screen import paragraph
from potluck.report.table import GAP, table_lines
from potluck.report.text import clean
from potluck.spec.fleet import POTLUCK, SOLO, STRATEGIES, Fleet, FleetMachine, Plan, Prediction
from potluck.units import UNKNOWN, bits_text, bytes_text, count_text, percent_text, rate_text, seconds_text

_INDENT = 14
_MOST_MACHINES = 8
_LONGEST_DEVICE = 60
_LEAST_CUT = 12
_HEADERS = ("strategy", "s/step", "computing", "wire", "waited", "speed-up", "efficiency")


def plan_lines(plan: Plan, width: int, *, whole: bool = False) -> list[Line]:
    """The whole plan, the verdict first. `whole`: tables of unlimited width, for a pipe."""
    most = max(width, 80)
    lines = [*_title(plan, most), Line(), *paragraph(plan.verdict, width, "bold"), Line()]
    lines += _machines(plan, None if whole else most)
    lines += [Line(), *_table(plan.rows), Line()]
    lines += paragraph(
        f"speed-up {plan.ideal_speedup:.3f}, if every machine computed all the time",
        width,
        label="ideal",
        indent=_INDENT,
    )
    for row in plan.rows:
        words = "; ".join(filter(None, (clean(row.waits), clean(row.note))))
        if words:
            lines += paragraph(words, width, label=row.strategy, indent=_INDENT + 2)
    lines += _levers(plan, width)
    if plan.costs:
        lines += [*([] if plan.levers else [Line()]), *_costs(plan), Line()]
    for number, text in enumerate(plan.assumptions):
        lines += paragraph(clean(text), width, LABEL, label="" if number else "assumed", indent=_INDENT)
    return [line.trimmed() if whole else line.trimmed().cropped(most) for line in lines]


def _title(plan: Plan, width: int) -> list[Line]:
    job = plan.job
    words = f"{count_text(job.parameters)} parameters, {_batch(plan)} a step, codec {clean(job.codec, 16)}"
    title = Line(clean(job.name, 40), "bold")
    if title.width + 3 + len(words) <= width:
        return [title.add(f"   {words}")]
    return [title, *paragraph(words, width)]


def _batch(plan: Plan) -> str:
    job = plan.job
    if job.tokens_per_sample > 1:
        return f"{job.batch * job.tokens_per_sample:,} tokens ({job.batch:,} samples)"
    return f"{job.batch:,} samples"


def _machines(plan: Plan, width: int | None) -> list[Line]:
    """A row for each machine, in shorter words if the long ones are too wide; None: unlimited width."""
    right = {2, 4, 5}
    rows = _machine_rows(plan, short=False)
    cells = [("machine", "device", "alone", "link", "share", "memory"), *rows]
    if width is not None and _grid_width(cells) > width:
        rows = _machine_rows(plan, short=True)
        unit = "tokens/s" if plan.job.tokens_per_sample > 1 else "samples/s"
        cells = [("machine", "device", unit, "link", "share", "memory"), *rows]
        for column in (1, 0):  # a device's name says much with its beginning, and a machine's enough
            cells = _narrowed(cells, column, _grid_width(cells) - width)
    lines = _grid(cells[: _MOST_MACHINES + 1], right=right)
    more = len(rows) - _MOST_MACHINES
    return [*lines, Line(f"and {more} more", LABEL)] if more > 0 else lines


def _machine_rows(plan: Plan, *, short: bool) -> list[tuple[str, ...]]:
    """A row for each machine; one for devices of a node that follow each other and are alike."""
    rows: list[tuple[str, ...]] = []
    before: FleetMachine | None = None
    for machine in plan.fleet.machines:
        cells = _machine(plan, machine, short=short)
        if before is not None and machine.is_beside(before) and cells[1:] == rows[-1][1:]:
            first = rows[-1][0].split(" … ")[0]
            rows[-1] = (f"{first} … {machine.name.rpartition('/')[2]}", *cells[1:])
        else:
            rows.append(cells)
        before = machine
    return rows


def _machine(plan: Plan, machine: FleetMachine, *, short: bool) -> tuple[str, ...]:
    ours = next((row for row in plan.rows if row.strategy == POTLUCK), plan.rows[-1])
    unit = "tokens" if plan.job.tokens_per_sample > 1 else "samples"
    device = clean(machine.device, _LONGEST_DEVICE)
    rate = rate_text(machine.samples_per_s * plan.job.tokens_per_sample, unit)
    return (
        clean(machine.name, 24) + (" (host)" if machine is plan.fleet.host else ""),
        (_plain_device(device) if short else device) or UNKNOWN,
        rate.removesuffix(f"{unit}/s").strip() if short else rate,
        _link(plan.fleet, machine),
        f"{ours.shares[machine.name]:,}" if ours.shares[machine.name] else "sits out",
        _memory(ours.memory_bytes[machine.name], machine.memory_bytes, short=short),
    )


def _memory(needed: float, there: float | None, *, short: bool) -> str:
    """5.7 GB of 8.3 GB, or 5.7 of 8.3 GB."""
    if there is None:
        return bytes_text(needed)
    a, b = bytes_text(needed), bytes_text(there)
    if short and a.split()[-1] == b.split()[-1]:
        a = a.split()[0]
    return f"{a} of {b}"


def _plain_device(name: str) -> str:
    """A device's name without redundant parts: trademarks, "Processor", its clock."""
    return " ".join(re.sub(r"\((?:R|TM)\)|\b(?:CPU|Processor|GeForce|NVIDIA)\b|@.*$", " ", name).split()) or name


def _narrowed(rows: Sequence[tuple[str, ...]], column: int, excess: int) -> list[tuple[str, ...]]:
    """The rows with one column narrower by this much, or as much as leaves it readable."""
    now = max(len(row[column]) for row in rows)
    most = max(min(now, _LEAST_CUT), now - max(0, excess))
    return [(*row[:column], clean(row[column], most), *row[column + 1 :]) for row in rows]


def _grid_width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(len(row[i]) for row in rows) for i in range(len(rows[0]))) + GAP * (len(rows[0]) - 1)


def _link(fleet: Fleet, machine: FleetMachine) -> str:
    if machine is not fleet.host and machine.is_beside(fleet.host):
        return clean(machine.intra, 20)
    return clean(machine.link, 20) or _rate(machine.link_bytes_per_s)


def _rate(bytes_per_s: float | None) -> str:
    return "no limit" if bytes_per_s is None else bits_text(bytes_per_s)


def _table(rows: Sequence[Prediction]) -> list[Line]:
    best = max(rows, key=lambda row: row.speedup)
    cells = [_HEADERS, *(_cells(row) for row in rows)]
    return _grid(cells, right={1, 2, 3, 4, 5, 6}, best=None if best.strategy == SOLO else rows.index(best))


def _cells(row: Prediction) -> tuple[str, ...]:
    return (
        row.strategy,
        *(_seconds(s) for s in (row.step_s, row.compute_s, row.exchange_s, row.exposed_s)),
        f"{row.speedup:.3f}",
        f"{row.efficiency:.3f}",
    )


def _seconds(seconds: float) -> str:
    """Three digits and no unit: the columns are of seconds."""
    return f"{seconds:.{0 if seconds >= 99.95 else 1 if seconds >= 9.995 else 2 if seconds >= 0.0995 else 3}f}"


def _levers(plan: Plan, width: int) -> list[Line]:
    if not plan.levers:
        return []
    lines = [Line()]
    for number, lever in enumerate(plan.levers):
        text = f"{lever.what}: {lever.speedup:.2f}× ({lever.gain - 1:+.0%})"
        lines += paragraph(text, width, label="" if number else "levers", indent=_INDENT)
    return [*lines, Line()]


def _costs(plan: Plan) -> list[Line]:
    unit = "tokens" if plan.job.tokens_per_sample > 1 else "samples"
    rows = [("cost", "strategy", f"{unit}/s", "watts", "an hour", f"10⁹ {unit}")]
    for cost in plan.costs:
        watts = UNKNOWN if cost.watts is None else f"{cost.watts:,.0f}"
        rate = rate_text(cost.units_per_s, unit).removesuffix(f"{unit}/s").strip()
        amounts = (f"{cost.per_hour:,.3f}", f"{cost.per_billion:,.2f}")
        rows.append((clean(cost.what, 32), cost.strategy, rate, watts, *amounts))
    return _grid(rows, right={2, 3, 4, 5})


def _grid(rows: Sequence[Sequence[str]], *, right: Collection[int], best: int | None = None) -> list[Line]:
    """The first row is the header; `best`: the row below it that is marked."""
    return table_lines(rows[0], rows[1:], right=right, styles={} if best is None else {best: BEST})


# -- sweeps and scales ----------------------------------------------------------------------------------

UNITS = {"link_mbit": "Mbit/s", "guests": "guests", "batch_tokens": "tokens", "parameters": "parameters"}


def value_text(variable: str, value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or variable != "link_mbit" else f"{value:.3g}"


def sweep_lines(sweep: Sweep, width: int) -> list[Line]:
    """A row for each value, and the value from which it is worth it."""
    variable = sweep.span.variable
    names = strategies_of(sweep)
    rows = [(UNITS[variable], *names, "ideal")]
    for point in sweep.points:
        speeds = [f"{point.speedup[name]:.2f}×" if name in point.speedup else UNKNOWN for name in names]
        rows.append((value_text(variable, point.value), *speeds, f"{point.ideal:.2f}×"))
    lines = _grid(rows, right=range(len(rows[0])))
    lines += [Line(), *paragraph(pays_text(sweep), width, "bold")]
    return lines + (paragraph(_crowded(sweep), width) if sweep.crowded_from is not None else [])


def _crowded(sweep: Sweep) -> str:
    """Why more guests are slower here, and not with --guests."""
    best = next(point for point in sweep.points if point.value == sweep.crowded_from)
    count = value_text("guests", best.value)
    return (
        f"{best.speedup[POTLUCK]:.2f}× with {count} guest{'s' * (best.value > 1)} is the best: the host lets in "
        "everybody who has a sample to compute, and they overload its link. Leave the others out; `--guests N` "
        "counts "
        "with the best number only."
    )


def strategies_of(sweep: Sweep) -> list[str]:
    """The columns that have a value somewhere, always in the same order."""
    return [name for name in STRATEGIES if any(name in point.speedup for point in sweep.points)]


def pays_text(sweep: Sweep) -> str:
    unit = "guest" if (sweep.span.variable, sweep.pays_from) == ("guests", 1) else UNITS[sweep.span.variable]
    if sweep.pays_from is None:
        return "potluck is not worth it anywhere in this range: it stays below 1.02×"
    value = value_text(sweep.span.variable, sweep.pays_from)
    if sweep.pays_from <= sweep.span.first:
        return f"potluck is worth it from the first value on: {value} {unit}"
    return f"potluck is worth it from about {value} {unit} on (it reaches 1.02×)"


def scale_lines(scale: Scale, fleet: Fleet, width: int) -> list[Line]:
    """A row for each number of guests, and the number at which the hub is full."""
    rows = [("guests", "one hub", "helping", "link busy", "tree of hubs", "DDP's ring", "ideal")]
    for row in scale.rows:
        tree = f"{row.tree:.2f}×" + (f" ({row.fan}^{row.levels})" if row.tree > 1.001 * row.flat else "")
        rows.append(
            (
                f"{row.guests:,}",
                f"{row.flat:.2f}×",
                f"{row.helping:,}",
                percent_text(row.link_busy),
                tree,
                f"{row.ring:.2f}×",
                f"{row.ideal:.2f}×",
            )
        )
    kinds = ", ".join(clean(g.device or g.name, 24) for g in fleet.guests[:4])
    title = Line(f"more and more guests ({kinds}) for {clean(fleet.host.name, 24)}", "bold")
    words = scale.words[0].upper() + scale.words[1:] + "."
    grid = _grid(rows, right=range(len(rows[0])))
    notes = paragraph(
        "helping: guests with whom one hub is fastest, and of whom it counts; leave the others out yourself: the "
        "host lets in everybody who has a sample to compute. 2^6: hubs of 2 guests each, 6 levels",
        width,
        LABEL,
    )
    return [title, Line(), *grid, Line(), *paragraph(words, width, "bold"), *notes]


def catalogue_lines() -> list[Line]:
    """The known names, with the source of each figure."""
    pages = {label: f"[{number}]" for number, label in enumerate(devices.pages(), 1)}
    rows: list[tuple[str, ...]] = [("device", "bf16", "fp32", "memory", "GB/s", "used", "watts", "sources")]
    details = [("device", "watts of", "formula of the peak, and a note")]
    for sheet in devices.catalogue().values():
        bf16, fp32 = sheet.bf16_tflops, devices.tflops_text(sheet.fp32_tflops)
        figures = (f"{sheet.memory_gb:g} GB", f"{sheet.bandwidth_gb_per_s:,.0f}", f"× {sheet.utilisation:.2f}")
        read_at = (sheet.peaks_from, sheet.memory_from, sheet.watts_from)
        sources = " ".join(pages.get(page, page) for page in read_at)
        peaks = (UNKNOWN if bf16 is None else devices.tflops_text(bf16), fp32)
        rows.append((sheet.name, *peaks, *figures, f"{sheet.watts:g}", sources))
        _, _, formula = (sheet.bf16_how or sheet.fp32_how).partition(": ")
        details.append((sheet.name, sheet.watts_of, "; ".join(filter(None, (formula, sheet.note)))))
    wires = [("link", "Mbit/s", "payload", "latency", "rate from")]
    for link in LINKS.values():
        rate, part = f"{link.line_mbit:,.0f}", f"× {link.part:.2f}"
        wires.append((link.name, rate, part, seconds_text(link.latency_s), link.source))
    note = (
        "Peaks are dense, in TFLOP/s. Sources: the pages where peak, memory and watts were read. Most of them "
        "quote the maker. A peak with a formula is derived: units × FLOP a cycle × GHz, in bf16 where there is "
        "bf16. Its page has the FLOP a cycle or the clock; the others are on the device's other pages. Estimate: "
        "found on no page. The part of the peak that is used, payload and latency are assumed. Nothing here was "
        "measured. The Apple Neural Engine is not here, because PyTorch cannot train on it: a Mac trains on its "
        "GPU."
    )
    return [
        *_grid(rows, right={1, 2, 3, 4, 5, 6}),
        Line(),
        *_grid(wires, right={1, 2, 3}),
        Line(),
        *_grid(details, right=set()),
        Line(),
        Line(f"models: {', '.join(NAMES)}; gpt:12 is the recipe gpt of depth 12; 350M is a number of parameters"),
        Line(note, LABEL),
        Line(),
        Line("read at:"),
        *(Line(f"  {pages[label]} {label}: {page}") for label, page in devices.pages().items()),
    ]
