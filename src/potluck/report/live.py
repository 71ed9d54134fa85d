"""The live view: owns the terminal while it is open, and redraws the run's state twice a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from potluck.report.frame import frame_lines
from potluck.report.line import Line
from potluck.report.sentences import describe
from potluck.report.state import RunState
from potluck.report.text import Output, clean
from potluck.spec.events import RunEvent, RunStarted, StepEnded
from potluck.units import seconds_text

# Each redraw holds the GIL that training wants; a person does not read faster than this.
REFRESH_PER_S = 2.0
_WARNS = ("warn", "bad")


class LiveView:
    """Draws in a separate thread, so that `event` costs training next to nothing."""

    def __init__(self, stream: TextIO, *, console: Console | None = None, refresh: bool = True) -> None:
        self._console = console or Console(file=stream, highlight=False)
        self._output = Output(stream)
        self._drawing = Drawing()
        self._lock = threading.Lock()
        self._closed = False
        self._live = Live(
            self._drawing,
            console=self._console,
            auto_refresh=refresh,
            refresh_per_second=REFRESH_PER_S,
            vertical_overflow="crop",
        )

    def event(self, event: RunEvent) -> None:
        with self._lock:
            if self._closed:
                return
            self._drawing.fold(event)
            if not self._live.is_started and (message := describe(event)) is not None and message.level in _WARNS:
                self._output.line(f"! {message.text}")  # there is no picture yet to show it in
            if isinstance(event, RunStarted) and not self._live.is_started:
                self._live.start()

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._live.is_started:
            self._live.stop()
        for line in self._drawing.last_words():
            self._output.line(line)


class Drawing:
    """The picture of the run's present state. Rich requests it at every refresh."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = RunState()
        self._clock = clock
        self._started_s = clock()
        self._stepped_s = self._started_s
        self._lock = threading.Lock()

    def fold(self, event: RunEvent) -> None:
        with self._lock:
            self._state.fold(event)
            if isinstance(event, StepEnded):
                self._stepped_s = self._clock()

    def last_words(self) -> list[str]:
        """The last line, with what the picture does not show: the duration and the paths."""
        with self._lock:
            end = self._state.end
        if end is None:
            return []
        lines = [f"{clean(end.reason) or 'ended'} after step {end.step}, {seconds_text(end.seconds)}"]
        return [*lines, f"run folder: {clean(end.folder)}"] if end.folder else lines

    def lines(self, width: int, height: int) -> list[Line]:
        with self._lock:
            now = self._clock()
            return frame_lines(
                self._state,
                width=width,
                height=height,
                elapsed_s=now - self._started_s,
                since_step_s=now - self._stepped_s,
            )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width, options.size.height - 1):
            for text, style in line.parts:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()
