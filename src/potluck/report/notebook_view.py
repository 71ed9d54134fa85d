"""The view in a notebook: one output below the cell, which is updated in place twice a second.

It draws what the live view draws in a terminal, as plain text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from potluck.report.live import REFRESH_PER_S, Drawing
from potluck.report.sentences import describe
from potluck.spec.events import RunEvent, RunStarted

WIDTH, HEIGHT = 100, 40


class NotebookView:
    """Publishes its own display when the training begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawing = Drawing(clock)
        self._lock = threading.Lock()
        self._handle: Any = None
        self._drawn = -1.0
        self._closed = False

    def event(self, event: RunEvent) -> None:
        with self._lock:
            if self._closed:
                return
            self._drawing.fold(event)
            if isinstance(event, RunStarted) and self._handle is None:
                from IPython.display import display

                self._handle = display(self._bundle(), raw=True, display_id=True)
            elif self._handle is None:
                if (message := describe(event)) is not None:
                    print(message.text)
            elif self._clock() - self._drawn >= 1 / REFRESH_PER_S:
                self._handle.update(self._bundle(), raw=True)

    def close(self) -> None:
        """Draw the last state, which stays in the notebook."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._handle is not None:
                self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        self._drawn = self._clock()
        lines = [line.plain.rstrip() for line in self._drawing.lines(WIDTH, HEIGHT)]
        return {"text/plain": "\n".join([*lines, *self._drawing.last_words()])}
