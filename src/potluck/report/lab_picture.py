"""A rig as a picture in the terminal: boxes, links and facts; also a list of rigs. PURE."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from potluck.balance.codecs import AUTO, INT4, codec_bytes
from potluck.plan.about import GPT_DEPTH, GPT_SEQUENCE, MachineFacts, RigFacts
from potluck.report.curve import BLOCKS
from potluck.report.line import LABEL, Line, cut
from potluck.report.screen import paragraph
from potluck.report.table import table_lines
from potluck.report.text import clean
from potluck.spec.rig import Machine, Rig
from potluck.units import bytes_text, count_text, rate_text, seconds_text

_ROLE_STYLE = {"host": "bold cyan", "guest": "bold green"}
_BAR_STYLE = {"host": "cyan", "guest": "green"}
_LINK_ROW = 2
_INDENT = 18
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def rig_lines(rig: Rig, facts: RigFacts, width: int) -> list[Line]:
    """The whole picture, at most `width` columns wide."""
    width = max(width, 72)
    name = clean(rig.name, 40)
    indent = Line(name).width + 3
    lines = paragraph(clean(rig.about), min(width, 100), label=name, indent=indent, label_style="bold")
    lines.append(Line())
    lines += _fleet(rig, facts, min(width, 104))
    lines += [Line(), *_moves(rig, width), *_facts(rig, facts, width)]
    lines += [Line(), *_links(rig, facts, width)] if rig.guests else []
    return [line.trimmed().cropped(width) for line in lines]


# -- the fleet ------------------------------------------------------------------------------------------


def _fleet(rig: Rig, facts: RigFacts, width: int) -> list[Line]:
    box = 28 if width < 96 else 34
    middle = min(width - 2 * box, 36)
    fastest = max((m.relative_speed or 0.0 for m in facts.machines), default=1.0) or 1.0
    known = {m.name: m for m in facts.machines}
    left = _box(rig, rig.host, known[rig.host.name], box, fastest)
    right: list[Line] = []
    joints: dict[int, Machine] = {}
    for guest in rig.guests:
        joints[len(right) + _LINK_ROW] = guest
        right += _box(rig, guest, known[guest.name], box, fastest)
    lines = []
    for number in range(max(len(left), len(right))):
        line = left[number] if number < len(left) else Line(" " * box)
        line = Line().join(line).join(_between(rig, number, joints, middle) if joints else Line())
        lines.append(line.join(right[number]) if number < len(right) else line)
    return lines


def _box(rig: Rig, machine: Machine, facts: MachineFacts, width: int, fastest: float) -> list[Line]:
    inner = width - 4
    style = _ROLE_STYLE[machine.role]
    name = cut(machine.name, inner - len(machine.role) - 3)
    fill = "─" * (width - 6 - len(machine.role) - Line(name).width)
    lines = [Line("╭ ").add(name, style).add(f" {fill} ").add(machine.role).add(" ╮")]
    rows = [Line(_seconds(machine)), Line(rate_text(facts.samples_per_s, "samples"))]
    rows.append(_speed_bar(facts.relative_speed, inner, fastest, _BAR_STYLE[machine.role]))
    if machine.role == "host":
        own = "" if _on_stem(rig) or len(rig.machines) == 2 else _rate_text(machine)
        link = " ".join(filter(None, (own, _latency_text(machine))))
        rows += [Line(f"link {link}")] if link else []
    if machine.cpu_limit is not None:
        rows.append(Line(f"{machine.cpu_limit:g} CPU cores at most"))
    if not _steady(machine):
        rows.append(_over_time(rig, machine, inner))
    wall = {_LINK_ROW: "├" if machine.role == "host" and rig.guests else "┤" if machine.role == "guest" else "│"}
    for number, row in enumerate(rows, 1):
        end = wall.get(number, "│")
        first, last = ("│", end) if machine.role == "host" else (end, "│")
        row = row.cropped(inner)
        lines.append(Line(f"{first} ").join(row).add(" " * (inner - row.width)).add(f" {last}"))
    return [*lines, Line("╰" + "─" * (width - 2) + "╯")]


def _seconds(machine: Machine) -> str:
    if machine.seconds_per_sample is None:
        return "as fast as this computer"
    return f"{machine.seconds_per_sample:.4g} s/sample"


def _speed_bar(relative: float | None, width: int, fastest: float, style: str) -> Line:
    """Speeds relative to the host's, to scale."""
    if relative is None:
        return Line("speed not known before", LABEL)
    number = f"{_relative_text(relative)}×"
    room = width - len(number) - 1
    eighths = max(round(relative / fastest * room * 8), 1)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
    return Line(bar, style).add(" " * (room - len(bar) + 1)).add(number, "bold")


def _relative_text(relative: float) -> str:
    """Two digits, or three if the third is not 0: an eighth is 0.125."""
    text = f"{relative:.3f}"
    return text.removesuffix("0")


def _steady(machine: Machine) -> bool:
    return not machine.speed_changes and machine.leave_at_step is None and machine.join_at_step == 1


def _over_time(rig: Rig, machine: Machine, width: int) -> Line:
    """The machine's speed in each step; a dot where it is absent."""
    steps = rig.workload.steps
    shown = [1 + at * steps // width for at in range(width)] if steps > width else list(range(1, steps + 1))
    speeds = [1 / (machine.seconds_per_sample_at(step) or 1.0) for step in range(1, steps + 1)]
    text = ""
    for step in shown:
        height = max(math.ceil(speeds[step - 1] / max(speeds) * len(BLOCKS) - 0.01), 1)
        text += BLOCKS[height - 1] if machine.present_at(step) else "·"
    return Line(text, _BAR_STYLE[machine.role])


def _between(rig: Rig, number: int, joints: dict[int, Machine], width: int) -> Line:
    """One row between the host's box and a guest's: the stem, the rail, a link with its rate."""
    first, last = min(joints), max(joints)
    stem = f"─ {_rate_text(rig.host)} ─" if _on_stem(rig) else "───"
    rail = len(stem) if len(joints) > 1 else 0
    before = stem[:rail] if number == first else " " * rail
    room = width - rail - 1
    guest = joints.get(number)
    if guest is None:
        above = joints.get(number - 1)  # latency is shown below the rate
        latency = _latency_text(above) if above is not None and above.link_mbit is not None else ""
        side = max((room - len(latency)) // 2, 0)
        line = Line(before + ("│" if first < number < last else " ") + " " * side).add(latency, "bold")
        return line.add(" " * (width - line.width))
    sign = "─" if len(joints) == 1 else "┬" if number == first else "└" if number == last else "├"
    label = _rate_text(guest) or _latency_text(guest) or (_rate_text(rig.host) if not rail else "")
    if not label:
        return Line(before + sign + "─" * room)
    side = max((room - len(label) - 2) // 2, 0)
    line = Line(before + sign + "─" * side).add(f" {label} ", "bold")
    return line.add("─" * (width - line.width))


def _on_stem(rig: Rig) -> bool:
    """Whether the host's rate is on the line that all guests share, because there is no room next to their own."""
    own = any(_rate_text(guest) or _latency_text(guest) for guest in rig.guests)
    return bool(_rate_text(rig.host)) and not own


def _rate_text(machine: Machine) -> str:
    if machine.link_mbit is None:
        return ""
    up = f"{machine.link_up_mbit:.4g} up, " if machine.link_up_mbit is not None else ""
    return f"{up}{machine.link_mbit:.4g} Mbit/s"


def _latency_text(machine: Machine) -> str:
    return f"+ {machine.latency_ms:.3g} ms" if machine.latency_ms else ""


# -- words ----------------------------------------------------------------------------------------------


def _moves(rig: Rig, width: int) -> list[Line]:
    """A description of the machines that join, leave or change speed."""
    lines: list[Line] = []
    for machine in rig.machines:
        events = [f"joins at step {machine.join_at_step}"] if machine.join_at_step > 1 else []
        if machine.leave_at_step is not None:
            events.append(f"leaves at step {machine.leave_at_step}")
        if machine.return_at_step is not None:
            events.append(f"returns at step {machine.return_at_step}")
        if machine.speed_changes:
            changes = [f"{c.seconds_per_sample:.4g} from step {c.at_step}" for c in machine.speed_changes]
            events.append("s/sample: " + ", ".join(changes))
        if events:
            lines += paragraph("; ".join(events), width, label=cut(machine.name, _INDENT - 1), indent=_INDENT)
    return [*lines, Line()] if lines else []


def _facts(rig: Rig, facts: RigFacts, width: int) -> list[Line]:
    return [
        line
        for label, text in _fact_texts(rig, facts)
        for line in paragraph(text, width, label=label, indent=_INDENT)
    ]


def _fact_texts(rig: Rig, facts: RigFacts) -> list[tuple[str, str]]:
    workload = rig.workload
    what, of = str(workload.recipe), "samples"
    if workload.recipe == "gpt":
        what = f"gpt of depth {workload.depth or GPT_DEPTH}"
        of = f"samples of {workload.sequence or GPT_SEQUENCE} bytes"
    texts = [
        ("trains", f"{what}, {count_text(facts.parameters)} parameters"),
        ("a step", f"{workload.global_batch} {of}; {workload.steps} steps"),
    ]
    step_s = seconds_text(facts.host_step_s)
    texts.append(("host alone", f"{step_s} a step" if facts.host_step_s else "as fast as this computer"))
    if facts.ideal_speedup is None or facts.host_step_s is None:
        return [*texts, ("ideal speed-up", "known when each machine has been measured alone")]
    average = "" if rig.steady else ", the average over the steps"
    step = seconds_text(facts.host_step_s / facts.ideal_speedup)
    texts.append(("ideal speed-up", f"{facts.ideal_speedup:.3f}, {step} a step{average}"))
    if rig.guests and facts.whole_sample_speedup is not None and facts.shares and facts.rounding_cost is not None:
        shares = " + ".join(str(n) for n in facts.shares.values())
        first = "" if rig.steady else " in the first step"
        cost = f"rounding costs {facts.rounding_cost * 100:.1f} %" if facts.rounding_cost >= 0.0005 else "no loss"
        texts.append(("in whole samples", f"{facts.whole_sample_speedup:.3f} ({shares}{first}): {cost}"))
    return texts


def _links(rig: Rig, facts: RigFacts, width: int) -> list[Line]:
    """The seconds that the gradients take on each guest's link."""
    codec = INT4 if rig.workload.codec == AUTO else rig.workload.codec
    coded = facts.parameters * codec_bytes(codec)
    sizes = f"{bytes_text(facts.gradient_bytes)} of gradients in fp32, {bytes_text(coded)} in {codec}"
    lines = paragraph(sizes, width, label="on the link", indent=_INDENT)
    shaped = [m for m in facts.machines if m.role == "guest" and m.link_mbit is not None]
    if not shaped:
        return [*lines, *paragraph("links are unshaped: as fast as this computer is", width, indent=_INDENT)]
    wide = max(12, len(codec) + 8)
    header = Line().cell("", _INDENT).cell("fp32 takes", 12, LABEL).cell("÷ step", 9, LABEL)
    lines.append(header.cell(f"{codec} takes", wide, LABEL).add("÷ step", LABEL))
    for machine in shaped:
        assert machine.link_mbit is not None
        per_byte_s = 8 / (machine.link_mbit * 1e6)
        row = Line().cell(machine.name, _INDENT - 1).add(" ")
        row.cell(seconds_text(facts.gradient_bytes * per_byte_s), 12)
        row.cell(_ratio(machine.gradient_ratio), 9, "bold")
        lines.append(row.cell(seconds_text(coded * per_byte_s), wide).add(_ratio(machine.coded_ratio), "bold"))
    meaning = (
        "÷ step: of the time of a step of the host alone, one way. Potluck needs the link twice a step: "
        "the weights' change to the guest, its gradient back."
    )
    return [*lines, *paragraph(meaning, min(width, 100), LABEL, indent=_INDENT)]


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}"


# -- the list -------------------------------------------------------------------------------------------


def list_lines(rigs: Sequence[tuple[Rig, RigFacts]], width: int | None) -> list[Line]:
    """One row per rig: its machines and the ideal speed-up. None: unlimited width, for a pipe."""
    rows = []
    for rig, facts in rigs:
        ratios = [m.gradient_ratio for m in facts.machines if m.gradient_ratio is not None]
        ideal = "–" if facts.ideal_speedup is None else f"{facts.ideal_speedup:.3f}×"
        ratio = f"{max(ratios):.2f}" if ratios else "–"
        rows.append((Text(rig.name, "bold"), str(len(rig.machines)), ideal, ratio, clean(rig.about)))
    header = ("rig", "machines", "ideal", "grad/step", "about")
    return table_lines(header, rows, right=(1, 2, 3), rule=False, wrapped=4, width=width)
