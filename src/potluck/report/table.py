"""A table as lines, laid out by rich: columns as wide as their widest cell, measured in terminal columns."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

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
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Collection[int] = (),
    styles: Mapping[int, str] | None = None,
    rule: bool = True,
    wrapped: int | None = None,
    width: int | None = None,
) -> list[Line]:
    """The header, a rule below it and the rows. No cell is cut; beyond `width` the column `wrapped` is wrapped.

    `right`: columns aligned to the right. `styles`: style of a row, by its number. A cell with a style is a `Text`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=_HEADER)
    for number, name in enumerate(header):
        justify: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(Text(name), justify=justify, no_wrap=number != wrapped, overflow="fold")
    for number, row in enumerate(rows):
        cells = (cell if isinstance(cell, Text) else Text(cell) for cell in row)
        table.add_row(*cells, style=(styles or {}).get(number))
    # Without a given width that of a page without an edge: the caller crops the lines.
    console = Console(file=io.StringIO(), width=width or 100_000, legacy_windows=False)
    lines = [_line(segments) for segments in console.render_lines(table, pad=False)]
    if rule:
        lines.insert(1, Line("─" * min(max(line.width for line in lines), _MOST_RULE), _HEADER))
    return lines


def _line(segments: Sequence[Segment]) -> Line:
    line = Line()
    for text, style, _ in segments:
        line.add(text, "" if style is None or not style else str(style))
    return line.trimmed()
