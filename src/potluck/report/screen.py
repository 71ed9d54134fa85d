"""Styled lines on a stream: colours on a terminal, plain text in a pipe, ASCII if UTF-8 cannot be written.

Every character is replaced by exactly one ASCII character, so that pictures keep their shape.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

from potluck.report.line import Line
from potluck.report.text import writes_utf8

_ASCII = str.maketrans(
    {
        **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼", "+"),
        **dict.fromkeys("─━╌", "-"),
        **dict.fromkeys("│┃", "|"),
        **dict.fromkeys("█▉▊▋▌", "#"),
        **dict.fromkeys("▍▎▏", "|"),
        **dict(zip("▁▂▃▄▅▆▇", "..--==#")),
        "×": "x",
        "÷": "/",
        "–": "-",
        "−": "-",
        "·": ".",
        "…": ".",
        "≈": "~",
        "→": ">",
        "µ": "u",
    }
)


def columns() -> int:
    """Columns of the terminal, 40 to 120."""
    return max(min(shutil.get_terminal_size((80, 24)).columns, 120), 40)


def show(lines: Iterable[Line], stream: TextIO) -> None:
    """Write the lines, with colours if the stream is a terminal."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for line in lines:
        text = Text(end="")
        for part, style in line.parts:
            text.append(shown(part, stream), style or None)
        if console.is_terminal:
            console.print(text, soft_wrap=True)
        else:
            stream.write(text.plain.rstrip() + "\n")


def shown(text: str, stream: object) -> str:
    """The text in characters that this stream can encode."""
    if writes_utf8(stream):
        return text
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.translate(_ASCII).encode(encoding, "replace").decode(encoding, "replace")


def paragraph(
    text: str, width: int, style: str = "", *, label: str = "", label_style: str = "dim", indent: int = 0
) -> list[Line]:
    """The text wrapped into lines that begin in one column, with a label before the first."""
    lines = []
    for row, part in enumerate(textwrap.wrap(text, max(width - indent, 20), break_on_hyphens=False) or [""]):
        lines.append(Line().cell(label if not row else "", indent, label_style).add(part, style))
    return lines
