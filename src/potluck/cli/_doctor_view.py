"""A diagnosis as lines for a terminal: findings, the worst first, then green lines for what is fine.

Text from other machines is stripped of control characters before it reaches this terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.doctor.network import ipv4
from potluck.report.line import Line
from potluck.report.screen import paragraph
from potluck.report.text import clean, writes_utf8
from potluck.spec.facts import CONTAINER, LOOPBACK, Case, Facts
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Diagnosis, Finding, Fine, LogReading
from potluck.units import bytes_text

_STYLES = {BLOCKER: "bold red", WARNING: "yellow", NOTE: "cyan"}
_SIGNS = {BLOCKER: "✗", WARNING: "!", NOTE: "i"}
_LOG_LABELS = {BLOCKER: "error", NOTE: "aside"}
_INDENT = 12
_MOST_FIX = 600
_TRY = (
    "torchrun --log-dir logs --tee 3 …   (then the other ranks' logs, too)",
    "export TORCH_DISTRIBUTED_DEBUG=DETAIL NCCL_DEBUG=INFO   (then run it again)",
    "potluck doctor --listen   (and its line on the other machine)",
)
_NO_FAILURE = "no known failure in this log"
_ALL_OF_IT = "if that run failed anyway: errors go to stderr, and 2>&1 adds them to the log"


def lines_of(case: Case, diagnosis: Diagnosis, width: int, stream: object) -> Iterator[Line]:
    utf8 = writes_utf8(stream)
    several = case.there is not None or case.between is not None
    if diagnosis.log is not None:
        yield from _log(diagnosis.log, width, utf8)
        yield Line(f"{clean(case.here.name, 40)}, as it is now", "bold")
        yield Line()
    for finding in diagnosis.findings:
        yield from finding_lines(finding, width, utf8)
    for fine in diagnosis.fine:
        yield from _fine(fine, width, utf8, several)
    for facts in (case.here, case.there):
        if facts is not None:
            yield Line()
            yield from _interfaces(facts, case, width)
    yield Line()
    yield from _verdict(diagnosis)


def _log(log: LogReading, width: int, utf8: bool) -> Iterator[Line]:
    """The findings of the log; the state of the machine follows."""
    name, much = clean(log.name, 60), f"{log.lines:,} line{'s' if log.lines != 1 else ''}"
    if log.left_out_bytes:
        much += f", {bytes_text(log.left_out_bytes)} in the middle not read"
    count = sum(finding.severity == BLOCKER for finding in log.findings)
    interrupted = next((f.what for f in log.findings if f.code == "interrupted"), "")
    if not count:
        told = "an unknown failure" if log.first_error else interrupted or _NO_FAILURE
        told += (", and that run ended well" if log.ended_well else "") + f" ({much})"
    elif not log.explained:
        told = f"an unknown failure ({much}); the log says:"
    elif count > 1:
        told = f"{count} known failures in {much}; the first is the likeliest cause, the others may follow from it"
    else:
        told = f"a known failure in {much}"
    yield from paragraph(f"{name}: {told}", width, "bold")
    if log.first_error:
        yield from paragraph(clean(log.first_error), width, "", label="  first error", indent=_INDENT + 3)
        for number, way in enumerate(_TRY):
            yield from _way(way, "" if number else "  try", width)
    elif not count and not log.ended_well and not interrupted:
        yield from paragraph(_ALL_OF_IT, width, "dim", indent=2)
    for number, fine in enumerate(log.network):
        where = f"{clean(fine.machine, 40)}: " if fine.machine else ""
        details = f" ({clean(fine.details)})" if fine.details else ""
        text = f"{where}{clean(fine.what)}{details}"
        yield from paragraph(text, width, "", label="" if number else "  network", indent=_INDENT)
    yield Line()
    for finding in log.findings:
        yield from _finding(finding, width, utf8, _LOG_LABELS.get(finding.severity, finding.severity))
        yield Line()


def finding_lines(finding: Finding, width: int, utf8: bool) -> Iterator[Line]:
    """One finding, with an empty line after it."""
    yield from _finding(finding, width, utf8, finding.severity)
    yield Line()


def _finding(finding: Finding, width: int, utf8: bool, label: str) -> Iterator[Line]:
    style = _STYLES[finding.severity]
    sign = _SIGNS[finding.severity] if utf8 else {"✗": "x"}.get(_SIGNS[finding.severity], _SIGNS[finding.severity])
    where = (
        "" if finding.potluck else f" [{clean(finding.machine, 40)}]"
    )  # a log is named above all of its findings
    head = f"{clean(finding.what)}{where}"
    yield from paragraph(head, width, style, label=f"{sign} {label}", label_style=style, indent=_INDENT)
    for label, text in (("how", finding.how), ("breaks", finding.breaks)):
        yield from paragraph(clean(text), width, "", label=f"  {label}", indent=_INDENT)
    for number, way in enumerate(finding.fix.split("\n")):
        yield from _way(clean(way, _MOST_FIX), "" if number else "  fix", width)
    if finding.potluck:
        yield from paragraph(clean(finding.potluck), width, "green", label="  potluck", indent=_INDENT)


def _way(text: str, label: str, width: int) -> Iterator[Line]:
    """A command on one line, however long, so that it can be copied. Its comment goes below if there is no room."""
    command, _, words = text.partition("   (")
    if not words or len(text) <= width - _INDENT:
        yield Line().cell(label, _INDENT, "dim").add(text, "bold")
        return
    yield Line().cell(label, _INDENT, "dim").add(command, "bold")
    yield from paragraph(f"({words}", width, "dim", indent=_INDENT + 2)


def _fine(fine: Fine, width: int, utf8: bool, several: bool) -> Iterator[Line]:
    sign = "✓" if utf8 else "ok"
    where = f"{clean(fine.machine, 40)}: " if several else ""
    yield Line().add(f"{sign} ", "green").add(where, "dim").add(clean(fine.what), "green")
    if fine.details:
        yield from paragraph(clean(fine.details), width, "dim", indent=4)


def _interfaces(facts: Facts, case: Case, width: int) -> Iterator[Line]:
    yield Line(f"interfaces of {clean(facts.name, 40)}", "dim")
    between = case.between
    used = between.used.route if between is not None and between.used is not None and facts is case.here else None
    for interface in facts.interfaces:
        addresses = ", ".join(ipv4(interface)) or "no IPv4 address"
        if used is not None and interface.name == used.interface:
            why = "used: the route to the other machine leaves there"
        elif facts.default_address in ipv4(interface):
            why = "a host listens there: " + (
                "the default route leaves there" if facts.default_route else "the first that is up"
            )
        elif interface.kind in (CONTAINER, LOOPBACK):
            why = f"left out: {interface.kind}"
        else:
            why = "" if interface.up else "down"
        line = Line().add("  ").cell(clean(interface.name, 16), 17).cell(clean(interface.kind, 11), 12)
        addresses = clean(addresses, 60)
        line.cell(addresses, max(18, len(addresses) + 2))
        if line.width + len(why) <= width:
            yield line.add(why, "dim").trimmed()
        else:
            yield line.trimmed()
            yield from paragraph(why, width, "dim", indent=4)


def _verdict(diagnosis: Diagnosis) -> Iterator[Line]:
    where = "this machine: " if diagnosis.log is not None else ""
    counts = {s: sum(f.severity == s for f in diagnosis.findings) for s in _STYLES}
    told = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts.items() if n)
    if counts[BLOCKER]:
        yield Line(f"{where}{told}: Potluck will not work until the first is fixed", "bold red")
    elif counts[WARNING]:
        yield Line(f"{where}{told}: Potluck works here", "yellow")
    else:
        yield Line(
            f"{where}all is well" + (f" ({told}: for other tools, not for Potluck)" if told else ""), "bold green"
        )
