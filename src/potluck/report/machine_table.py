"""The live view's table: one row per machine, with fewer columns on a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from potluck.report.line import LABEL, Line
from potluck.report.state import MachineRow
from potluck.report.table import GAP
from potluck.units import percent_text, rate_text

_STATE_STYLE = {
    "computing": "green",
    "done": "green",
    "joining": "cyan",
    "syncing": "cyan",
    "checking": "cyan",
    "starting": "cyan",
    "sitting out": "yellow",
    "late": "yellow",
    "gone": "red",
}
_LEAST_STATE = len("sitting out")
_WIDE = 98


@dataclass(frozen=True, slots=True)
class _MachineColumn:
    header: str
    cells: Sequence[tuple[str, str]]
    """Text and style, one for each machine."""
    right: bool = False
    drop: int = 0
    """On a narrow terminal the column with the highest number is dropped first; 0 is never dropped."""
    most: int = 24
    """The greatest width, unless there is room to spare."""

    @property
    def natural(self) -> int:
        return max([cell_len(self.header), *(cell_len(text) for text, _ in self.cells)])

    @property
    def width(self) -> int:
        return min(self.natural, self.most)


def machine_table(machines: Sequence[MachineRow], width: int, room: int) -> list[Line]:
    """The header and a row per machine in at most `room` lines (two at least), the rest as a number."""
    total = sum(m.samples for m in machines)
    hidden = 0
    if len(machines) > max(room - 1, 1):
        hidden = len(machines) - max(room - 2, 1)
        machines = machines[: len(machines) - hidden]
    lines, cut = _aligned(_columns(machines, total, width), width)
    if cut and len(lines) + len(cut) <= room:
        # A reason too long for its column gets a line of its own.
        short = [replace(m, reason="") if row in cut else m for row, m in enumerate(machines)]
        lines, _ = _aligned(_columns(short, total, width), width)
        for row in reversed(cut):
            if machines[row].reason:
                lines.insert(row + 2, Line(f"  └ {machines[row].reason}", _style_of(machines[row])))
    if hidden:
        lines.append(Line(f"and {hidden} more machines", LABEL))
    return lines


def _columns(machines: Sequence[MachineRow], total: int, width: int) -> list[_MachineColumn]:
    share = [m.samples / total if total else 0.0 for m in machines]
    columns = [
        _MachineColumn(
            "machine",
            [(m.name, "bold") for m in machines],
            most=12 if width < 50 else 20 if width < _WIDE else 28,
        ),
        _MachineColumn("role", [(m.role, "") for m in machines], drop=4),
        _MachineColumn("device", [(m.device, "") for m in machines], drop=5, most=12 if width < _WIDE else 24),
        _MachineColumn("samples", [(str(m.samples), "") for m in machines], right=True, drop=2),
        _MachineColumn("at once", [(_at_once(m.micro_batch), "") for m in machines], right=True, drop=3),
        _MachineColumn("share", [(percent_text(s), "") for s in share], right=True, drop=1),
    ]
    if width >= _WIDE:
        columns.append(_MachineColumn("", [(_share_bar(s), "green") for s in share]))
    return [
        *columns,
        _MachineColumn("rate", [(rate_text(m.rate), "") for m in machines], right=True, drop=2),
        _MachineColumn("busy", [(percent_text(m.busy), "") for m in machines], right=True, drop=3),
        _MachineColumn("state", [(_state_text(m), _style_of(m)) for m in machines], most=200),
    ]


def _at_once(micro_batch: int | None) -> str:
    return str(micro_batch) if micro_batch else "–"


def _state_text(machine: MachineRow) -> str:
    return f"{machine.state}: {machine.reason}" if machine.reason else machine.state


def _style_of(machine: MachineRow) -> str:
    return _STATE_STYLE.get(machine.state, "")


def _share_bar(share: float) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * 10 * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _aligned(columns: list[_MachineColumn], width: int) -> tuple[list[Line], list[int]]:
    """Drop columns until the table fits, with some room for the last column, then lay it out.

    Also returns the rows whose last cell had to be cut.
    """
    while _needed(columns) > width and any(c.drop for c in columns):
        last = max(columns, key=lambda c: c.drop)
        columns = [c for c in columns if c is not last]
    widths = _widths(columns, width)
    header = Line()
    for column, cells in zip(columns, widths):
        header.cell(column.header, cells, LABEL, right=column.right).add(" " * GAP)
    lines = [header]
    for row in range(len(columns[0].cells)):
        line = Line()
        for column, cells in zip(columns, widths):
            text, style = column.cells[row]
            line.cell(text, cells, style, right=column.right).add(" " * GAP)
        lines.append(line)
    cut = [row for row, (text, _) in enumerate(columns[-1].cells) if cell_len(text) > widths[-1]]
    return [line.trimmed() for line in lines], cut


def _widths(columns: Sequence[_MachineColumn], width: int) -> list[int]:
    """The columns' own widths; spare room goes to those that were cut, then to the last."""
    widths = [c.width for c in columns]
    spare = width - sum(widths) - GAP * (len(widths) - 1)
    for i, column in enumerate(columns[:-1]):
        extra = max(min(column.natural - widths[i], spare), 0)
        widths[i] += extra
        spare -= extra
    widths[-1] = max(widths[-1] + spare, 1)
    return widths


def _needed(columns: Sequence[_MachineColumn]) -> int:
    return sum(c.width + GAP for c in columns[:-1]) + min(columns[-1].width, _LEAST_STATE)
