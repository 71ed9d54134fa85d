"""Tables as lines: rich measures, wraps and aligns the cells, and nothing is cut in a pipe."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.report.line import Line

LABEL, BEST = "dim", "bold green"
_UNLIMITED = 10_000
_RULED = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
"""Only a rule below the headers; columns are two blanks apart."""


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    left: Collection[int] = (0,),
    wrapped: int | None = None,
    styles: Sequence[str] = (),
    best: int | None = None,
    width: int | None = None,
    ruled: bool = True,
) -> list[Line]:
    """The table in at most `width` columns; None: as wide as it is, for a pipe.

    `left` are the columns that are not numbers; where there is no room, the `wrapped` one is broken into lines.
    `styles` are of the columns, and `best` is a row to stand out.
    """
    table = Table(box=_RULED if ruled else None, show_edge=False, pad_edge=False, header_style=LABEL)
    table.border_style = LABEL
    table.padding = (0, 1, 0, 0) if ruled else (0, 2, 0, 0)
    for number, header in enumerate(headers):
        table.add_column(
            header,
            justify="left" if number in left else "right",
            no_wrap=number != wrapped,
            overflow="fold" if number == wrapped else "ellipsis",
            style=styles[number] if number < len(styles) else None,
        )
    for number, row in enumerate(rows):
        table.add_row(*row, style=BEST if number == best else None)
    console = Console(file=io.StringIO(), width=width or _UNLIMITED, markup=False, emoji=False, highlight=False)
    lines = []
    for segments in console.render_lines(table, pad=False):
        line = Line()
        for segment in segments:
            line.add(segment.text, str(segment.style) if segment.style else "")
        lines.append(line.trimmed())
    return lines
