"""Styled lines on a stream: colours on a terminal, plain text in a pipe, ASCII where UTF-8 cannot be written.

Every sign has exactly one ASCII sign in its place, so that pictures keep their shape.
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


def columns(most: int = 120) -> int:
    """How wide a picture may be."""
    return max(min(shutil.get_terminal_size((80, 24)).columns, most), 40)


def show(lines: Iterable[Line], stream: TextIO) -> None:
    """Write the lines; the stream decides how they look."""
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
    """The text as this stream can write it."""
    if writes_utf8(stream):
        return text
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.translate(_ASCII).encode(encoding, "replace").decode(encoding, "replace")


def paragraph(
    text: str, width: int, style: str = "", *, label: str = "", label_style: str = "dim", indent: int = 0
) -> list[Line]:
    """The text broken into lines; a label stands before the first, and all begin in one column."""
    lines = []
    for row, part in enumerate(textwrap.wrap(text, max(width - indent, 20), break_on_hyphens=False) or [""]):
        lines.append(Line().cell(label if not row else "", indent, label_style).add(part, style))
    return lines
