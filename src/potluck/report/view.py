"""Views of a run while it goes on: plain lines, JSON lines, silence, or the live view in a terminal.

A view is given events and shows them; it does not know who makes them, and nothing it does can stop a run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from potluck.report.messages import describe, end_text, eta_text, loss_text, steps_text
from potluck.report.text import Output, clean, integer, number, writes_utf8
from potluck.train.events import View
from potluck.units import count_text, factor_text, rate_text, seconds_text

Event = Mapping[str, Any]
Mode = Literal["auto", "live", "plain", "json", "quiet"]


def make_view(mode: Mode = "auto", stream: TextIO | None = None) -> View:
    """The view for this mode; "auto" is live in a notebook and on a terminal that can show it, plain elsewhere."""
    stream = sys.stdout if stream is None else stream
    if mode == "quiet":
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

    def event(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class JsonView:
    """Each event as one line of JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._output = Output(stream)
        self._lock = threading.Lock()
        self._closed = False

    def event(self, event: dict[str, Any]) -> None:
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError:
            # A loss of NaN is news, but NaN is no JSON.
            line = json.dumps(_finite(event))
        with self._lock:
            if not self._closed:
                self._output.line(line)

    def close(self) -> None:
        with self._lock:
            self._closed = True


class PlainView:
    """A line for each step, and one for whatever else happens. Never coloured: logs are made of it."""

    def __init__(self, stream: TextIO) -> None:
        self._output = Output(stream)
        self._lock = threading.Lock()
        self._closed = False

    def event(self, event: dict[str, Any]) -> None:
        lines = _plain_lines(event)
        with self._lock:
            if not self._closed:
                for line in lines:
                    self._output.line(line)

    def close(self) -> None:
        with self._lock:
            self._closed = True


def _plain_lines(event: Event) -> list[str]:
    kind = event.get("event")
    if kind == "run_start":
        return _start_lines(event)
    if kind == "step":
        return [_step_line(event)]
    if kind == "run_end":
        lines = [end_text(event)]
        return [*lines, f"run folder: {clean(event.get('folder'))}"] if event.get("folder") else lines
    message = describe(event)
    if message is None:
        return []
    mark = "! " if message.level in ("warn", "bad") else "" if kind == "note" else "* "
    return [mark + message.text]


def _start_lines(event: Event) -> list[str]:
    steps = f"{event['steps']} steps" if event.get("steps") else "steps without end"
    facts = [
        clean(event.get("recipe")) or "training",
        f"{count_text(number(event, 'parameters'))} parameters",
        f"{steps} of {integer(event, 'global_batch')} samples",
        f"{clean(event.get('machine'))} on {clean(event.get('device'))}",
    ]
    if event.get("trained_parameters") not in (None, event.get("parameters")):
        facts.insert(2, f"{count_text(number(event, 'trained_parameters'))} of them trained")
    lines = [f"run {clean(event.get('run_id'))}: {', '.join(facts)}"]
    if event.get("join"):
        lines.append(f"guests may join at any time; codec {clean(event.get('codec'))}")
    if event.get("resumed_from") is not None:
        lines.append(f"resumed after step {integer(event, 'resumed_from')}")
    return lines


def _step_line(event: Event) -> str:
    facts = [
        f"step {steps_text(event)}",
        f"loss {loss_text(number(event, 'loss'))}",
        seconds_text(number(event, "step_s")),
        rate_text(number(event, "samples_per_s"), "samples"),
    ]
    if number(event, "tokens_per_s") is not None:
        facts.append(rate_text(number(event, "tokens_per_s"), "tokens"))
    if (mfu := number(event, "mfu")) is not None:
        facts.append(f"MFU {mfu:.0%}")
    if number(event, "speedup") is not None:
        facts.append(f"{factor_text(number(event, 'speedup'))} alone")
    eta_s = number(event, "eta_s")
    if eta_s is not None:
        facts.append(f"ETA {eta_text(eta_s)}")
    machines = [m for m in event.get("machines") or () if isinstance(m, Mapping)]
    if len(machines) > 1:
        facts.append(" + ".join(f"{clean(m.get('name'), 24)} {_samples_text(m)}" for m in machines))
    elif machines and integer(machines[0], "micro_batch"):
        facts.append(f"{integer(machines[0], 'micro_batch')} at once")
    if event.get("applied") is False:
        facts.append("not applied")
    if integer(event, "dropped"):
        facts.append(f"{integer(event, 'dropped')} dropped")
    return "  ".join(facts)


def _samples_text(machine: Event) -> str:
    """'48 by 16': so many samples, at most so many at once."""
    at_once = integer(machine, "micro_batch")
    return f"{integer(machine, 'samples')}" + (f" by {at_once}" if at_once else "")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
