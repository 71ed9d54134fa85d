"""A table as lines, laid out by rich: columns as wide as their widest cell, measured in terminal columns."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from potluck.report.line import Line

GAP = 2
_HEADER = "dim"
_MOST_RULE = 100


def table_lines(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    styles: Mapping[int, str] | None = None,
    rule: bool = True,
) -> list[Line]:
    """The header, a rule below it and the rows; no cell is cut or wrapped.

    `right`: columns aligned to the right. `styles`: style of a row, by its number.
    """
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=_HEADER)
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="right" if number in right else "left", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), style=(styles or {}).get(number))
    # The width is that of a page without an edge: who shows the lines crops them.
    console = Console(file=io.StringIO(), width=100_000, legacy_windows=False)
    lines = [_line(segments) for segments in console.render_lines(table, pad=False)]
    if rule:
        lines.insert(1, Line("─" * min(max(line.width for line in lines), _MOST_RULE), _HEADER))
    return lines


def _line(segments: Sequence[Segment]) -> Line:
    line = Line()
    for text, style, _ in segments:
        line.add(text, "" if style is None or not style else str(style))
    return line.trimmed()
