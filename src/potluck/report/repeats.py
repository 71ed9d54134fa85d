"""Lines that repeat: the first is shown at once, then at most one every few seconds, with how many there were.

With steps of a few milliseconds one late guest would fill the terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 5.0
"""Time between two lines about the same."""


@dataclass(slots=True)
class _RepeatedLine:
    shown_at: float
    mark: str = ""
    text: str = ""
    times: int = 0
    """Lines since the last that was shown."""


class Repeats:
    """Not locked: the view does that."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, ...], _RepeatedLine] = {}

    def add(self, key: tuple[str, ...], mark: str, text: str) -> list[str]:
        """The line if it is shown now; otherwise it is kept until `due` or `rest`."""
        kept = self._kept.get(key)
        if kept is None:
            self._kept[key] = _RepeatedLine(self._clock())
            return [mark + text]
        kept.mark, kept.text, kept.times = mark, text, kept.times + 1
        return []

    def due(self) -> list[str]:
        """The lines that are due. Call it often: there is no timer."""
        now = self._clock()
        over = [key for key, kept in self._kept.items() if now - kept.shown_at >= EVERY_S]
        lines = [_line(self._kept[key]) for key in over if self._kept[key].times]
        for key in over:
            if self._kept[key].times:
                self._kept[key] = _RepeatedLine(now)
            else:
                del self._kept[key]
        return lines

    def rest(self) -> list[str]:
        """Everything that is kept, at the end."""
        lines = [_line(kept) for kept in self._kept.values() if kept.times]
        self._kept.clear()
        return lines


def _line(kept: _RepeatedLine) -> str:
    times = f"({kept.times} times) " if kept.times > 1 else ""
    return f"{kept.mark}{times}{kept.text}"
