"""One line of styled text, measured in terminal columns.

Lighter than rich's Text: the live view makes about thirty lines twice a second, beside training.
"""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

LABEL, BEST = "dim", "bold green"
"""The styles of the word that says what a figure is, and of the best row."""


class Line:
    """Parts of (text, style), added from left to right."""

    __slots__ = ("parts", "width")

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts: list[tuple[str, str]] = []
        self.width = 0
        self.add(text, style)

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.parts)

    def add(self, text: str, style: str = "") -> Line:
        if text:
            self.parts.append((text, style))
            self.width += cell_len(text)
        return self

    def join(self, other: Line) -> Line:
        self.parts += other.parts
        self.width += other.width
        return self

    def cell(self, text: str, width: int, style: str = "", *, right: bool = False) -> Line:
        """A table cell of exactly `width` columns."""
        text = cut(text, width)
        pad = " " * (width - cell_len(text))
        return self.add(pad).add(text, style) if right else self.add(text, style).add(pad)

    def trimmed(self) -> Line:
        """The line without trailing blanks."""
        while self.parts and not self.parts[-1][0].strip(" "):
            self.width -= len(self.parts.pop()[0])
        return self

    def cropped(self, width: int) -> Line:
        """At most `width` columns, with an ellipsis if it was cut."""
        if self.width <= width:
            return self
        line = Line()
        for text, style in self.parts:
            room = width - line.width
            if cell_len(text) >= room:
                # Cut even where this part just fits, because something follows it.
                return line.add(cut(text + "  ", room), style)
            line.add(text, style)
        return line


def cut(text: str, width: int) -> str:
    """At most `width` columns of the text."""
    if width < 1:
        return ""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
