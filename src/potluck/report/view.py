"""Views of a run while it runs: plain lines, JSON lines, nothing, or the live view in a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal, TextIO

from potluck.report.repeats import Repeats
from potluck.report.sentences import describe, end_text, eta_text, loss_text, steps_text
from potluck.report.text import Output, clean, writes_utf8
from potluck.spec.events import Logged, MachineFigures, RunEnded, RunEvent, RunNote, RunStarted, StepEnded, to_json
from potluck.train.event_log import View
from potluck.units import count_text, factor_text, rate_text, seconds_text

Mode = Literal["auto", "live", "plain", "json", "quiet"]


def make_view(mode: Mode = "auto", stream: TextIO | None = None) -> View:
    """The view for this mode; "auto" is live in a notebook and on a terminal that can show it, plain elsewhere."""
    stream = sys.stdout if stream is None else stream
    if mode == "quiet" or stream is None:  # None: Python was started with a closed stdout
        return QuietView()
    if mode == "json":
        return JsonView(stream)
    if mode == "auto" and in_notebook():
        from potluck.report.notebook_view import NotebookView

        return NotebookView()
    if mode == "live" or (mode == "auto" and can_be_live(stream)):
        # Here, because rich takes longer to import than everything else in `potluck --help`.
        from potluck.report.live import LiveView

        return LiveView(stream)
    return PlainView(stream)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    import IPython

    return hasattr(IPython.get_ipython(), "kernel")


def can_be_live(stream: TextIO) -> bool:
    """A terminal that moves its cursor and shows UTF-8."""
    try:
        terminal = stream.isatty()
    except ValueError:  # closed
        return False
    kind = os.environ.get("TERM", "dumb" if os.name == "posix" else "")
    return terminal and kind != "dumb" and writes_utf8(stream)


class QuietView:
    """Shows nothing."""

    def event(self, event: RunEvent) -> None:
        pass

    def close(self) -> None:
        pass


class JsonView:
    """Each event as one line of JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._output = Output(stream)
        self._lock = threading.Lock()
        self._closed = False

    def event(self, event: RunEvent) -> None:
        line = to_json(event).decode()
        with self._lock:
            if not self._closed:
                self._output.line(line)

    def close(self) -> None:
        with self._lock:
            self._closed = True


class PlainView:
    """A line for each step and for each other event, never coloured, because logs are made of it.

    Warnings about one guest that repeat within seconds are one line with a count.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = Output(stream)
        self._repeats = Repeats(clock)
        self._lock = threading.Lock()
        self._closed = False

    def event(self, event: RunEvent) -> None:
        with self._lock:
            if not self._closed:
                for line in self._lines(event):
                    self._output.line(line)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                for line in self._repeats.rest():
                    self._output.line(line)
            self._closed = True

    def _lines(self, event: RunEvent) -> list[str]:
        match event:
            case RunStarted():
                return _start_lines(event)
            case StepEnded():
                return [*self._repeats.due(), _step_line(event)]
            case RunEnded():
                folder = [f"run folder: {clean(event.folder)}"] if event.folder else []
                return [*self._repeats.rest(), end_text(event), *folder]
        message = describe(event)
        if message is None:
            return []
        mark = "! " if message.level in ("warn", "bad") else "" if isinstance(event, RunNote | Logged) else "* "
        if message.level == "warn" and message.about[1]:
            return [*self._repeats.due(), *self._repeats.add(message.about, mark, message.text)]
        return [mark + message.text]


def _start_lines(event: RunStarted) -> list[str]:
    epochs = f"{event.epochs} epoch{'s' if event.epochs != 1 else ''} in steps" if event.epochs else None
    steps = f"{event.steps} steps" if event.steps else epochs or "steps without end"
    facts = [
        clean(event.recipe) or "training",
        f"{count_text(event.parameters)} parameters",
        f"{steps} of {event.global_batch} samples",
        f"{clean(event.machine)} on {clean(event.device)}",
    ]
    if event.trained_parameters != event.parameters:
        facts.insert(2, f"{count_text(event.trained_parameters)} of them trained")
    lines = [f"run {clean(event.run_id)}: {', '.join(facts)}"]
    if event.join:
        lines.append(f"guests may join at any time; codec {clean(event.codec)}")
    if event.resumed_from is not None:
        lines.append(f"resumed after step {event.resumed_from}")
    return lines


def _step_line(event: StepEnded) -> str:
    facts = [
        f"step {steps_text(event)}",
        f"loss {loss_text(event.loss)}",
        seconds_text(event.step_s),
        rate_text(event.samples_per_s, "samples"),
    ]
    if event.tokens_per_s is not None:
        facts.append(rate_text(event.tokens_per_s, "tokens"))
    if event.mfu is not None:
        facts.append(f"MFU {event.mfu:.0%}")
    if event.speedup is not None:
        facts.append(f"{factor_text(event.speedup)} alone")
    if event.eta_s is not None:
        facts.append(f"ETA {eta_text(event.eta_s)}")
    if len(event.machines) > 1:
        facts.append(" + ".join(f"{clean(m.name, 24)} {_samples_text(m)}" for m in event.machines))
    elif event.machines and event.machines[0].micro_batch:
        facts.append(f"{event.machines[0].micro_batch} at once")
    if not event.applied:
        facts.append("not applied")
    if event.dropped:
        facts.append(f"{event.dropped} dropped")
    return "  ".join(facts)


def _samples_text(machine: MachineFigures) -> str:
    """'48 by 16': 48 samples, at most 16 at once."""
    return f"{machine.samples}" + (f" by {machine.micro_batch}" if machine.micro_batch else "")
