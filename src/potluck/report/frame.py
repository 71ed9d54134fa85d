"""The live view's picture: a run's state as lines of styled text for a given width and height. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from potluck.report.curve import sparkline
from potluck.report.data_wait import LEAST_S, MUCH
from potluck.report.line import LABEL, Line
from potluck.report.machine_table import machine_table
from potluck.report.sentences import eta_text, loss_text, values_text, wire_text
from potluck.report.state import Notice, RunState
from potluck.report.text import clean
from potluck.spec.events import RunEnded, RunStarted, StepEnded
from potluck.units import count_text, factor_text, percent_text, rate_text, seconds_text

_LEVEL_STYLE = {"good": "green", "info": "", "warn": "yellow", "bad": "red"}
_LEVEL_MARK = {"good": "✓", "info": "·", "warn": "!", "bad": "✗"}
_MIN_WIDTH = 20
_MOST_NEWS = 5
_MOST_LINES = 8
"""Lines for all messages together; one message may take several."""
_AIRY_HEIGHT = 14


def frame_lines(
    state: RunState, *, width: int, height: int, elapsed_s: float = 0.0, since_step_s: float = 0.0
) -> list[Line]:
    """At most `height` lines of at most `width` columns; if not all fit, the most important ones."""
    width, height = max(width, _MIN_WIDTH), max(height, 1)
    inner = width - 2
    lines = [_header(state, inner)]
    if height >= _AIRY_HEIGHT:
        lines.append(Line())
    lines += _progress(state, inner, elapsed_s, since_step_s)
    room = max(height - len(lines), 0)
    table = machine_table(state.machines, inner, max(room - 3, 2))
    news = _news(state, inner, max(min(_MOST_LINES, room - len(table) - 2), 0))
    lines += [Line(), *table]
    if news:
        lines += [Line(), *news]
    # Cut at the right edge: a wrapped line would tear the picture.
    return [Line(" ").join(line).cropped(width) for line in lines[:height]]


def _header(state: RunState, width: int) -> Line:
    start = state.start
    line = Line("potluck", "bold")
    if start is None:
        return line
    facts = [(clean(start.recipe), "bold cyan"), (clean(start.run_id), ""), (_parameters(start), "")]
    facts.append((f"{clean(start.machine, 24)} ({clean(start.device, 24)})", ""))
    if start.join:
        facts.append(("guests may join", ""))
    for fact, style in facts:
        if fact and line.width + 2 + cell_len(fact) <= width:
            line.add("  ").add(fact, style)
    return line


def _parameters(start: RunStarted) -> str:
    every, trained = start.parameters, start.trained_parameters
    if trained != every:
        return f"{count_text(trained)} of {count_text(every)} parameters trained"
    return f"{count_text(every)} parameters"


def _progress(state: RunState, width: int, elapsed_s: float, since_step_s: float) -> list[Line]:
    step = state.step
    if step is None:
        return [Line(f"waiting for the first step, {eta_text(elapsed_s)}")]
    lines = [_step_line(state, step, width, elapsed_s, since_step_s), _loss_line(state, step, width)]
    if state.logged:
        lines.append(_labelled("logged").add(clean(values_text(state.logged), width - 8)))
    lines.append(_speed_line(step, state.end, width))
    wire = _wire_line(step)
    if wire is not None and wire.width <= width:
        lines.append(wire)
    return lines


def _labelled(label: str) -> Line:
    return Line(f"{label:<7}", LABEL)


def _step_line(state: RunState, step: StepEnded, width: int, elapsed_s: float, since_step_s: float) -> Line:
    done, steps = state.done, state.steps
    line = _labelled("step").add(f"{done}", "bold")
    if not steps:
        return line.add("   " + (clean(state.end.reason) if state.end else f"{eta_text(elapsed_s)} so far"))
    line.add(f"/{steps}")
    after = f" {percent_text(done / steps):>5}"
    if state.end:
        after += f"  {clean(state.end.reason) or 'ended'}"
    elif step.eta_s is not None:
        after += f"  ETA {eta_text(max(step.eta_s - since_step_s, 0.0))}"
    room = width - line.width - len(after) - 2
    if room >= 8:
        line.add("  ").join(_bar(done / steps, room))
    return line.add(after)


def _bar(fraction: float, width: int) -> Line:
    """A bar in steps of half a character; the rest is a thinner line, to be readable without colours."""
    halves = round(min(max(fraction, 0.0), 1.0) * width * 2)
    bar = Line("━" * (halves // 2) + "╸" * (halves % 2), "green")
    return bar.add("─" * (width - halves // 2 - halves % 2), "bright_black")


def _loss_line(state: RunState, step: StepEnded, width: int) -> Line:
    line = _labelled("loss").add(loss_text(step.loss), "bold red" if step.loss is None else "bold")
    if state.not_applied:
        line.add(f"  {state.not_applied} not applied", "bold red")
    room = min(width - line.width - 2, 60)
    if room >= 4:
        line.add("  ").add(sparkline(state.losses.values, room), "cyan")
    return line


def _speed_line(step: StepEnded, end: RunEnded | None, width: int) -> Line:
    """The speed of the last steps; once the run has ended, of all its steps."""
    facts: list[tuple[str, str]] = [(rate_text((end or step).samples_per_s, "samples"), "bold")]
    speedup = (end or step).speedup
    if speedup is not None:
        style = "bold green" if speedup >= 1.005 else "" if speedup >= 0.985 else "bold yellow"
        facts.append((factor_text(speedup) + (" this machine alone" if width >= 74 else " alone"), style))
    if end is not None:
        return _fitting(_labelled("speed"), facts, width)
    if step.tokens_per_s is not None:
        facts.append((rate_text(step.tokens_per_s, "tokens"), ""))
    facts.append((f"{seconds_text(step.step_s)} a step", ""))
    waited_s = step.data_s + step.read_s
    if waited_s >= max(LEAST_S, MUCH * step.step_s) and step.step_s:
        facts.append((f"waiting for data {min(1.0, waited_s / step.step_s):.0%}", "yellow"))
    if step.mfu is not None:
        facts.append((f"MFU {step.mfu:.0%}", ""))
    return _fitting(_labelled("speed"), facts, width)


def _fitting(line: Line, facts: Sequence[tuple[str, str]], width: int) -> Line:
    """The line with those facts for which there is room."""
    gap = ""
    for text, style in facts:
        if line.width + len(gap) + len(text) <= width:
            line.add(gap).add(text, style)
            gap = "   "
    return line


def _wire_line(step: StepEnded) -> Line | None:
    """The guests' cost; None without traffic."""
    if not step.bytes_up and not step.bytes_down:
        return None
    line = _labelled("wire").add(wire_text(step.bytes_up, step.bytes_down))
    line.add(f", host waited {seconds_text(step.wait_s)}")
    if step.dropped:
        line.add(f", {step.dropped} samples dropped", "yellow")
    return line


def _news(state: RunState, width: int, room: int) -> list[Line]:
    """The last messages, the newest last. A long one is wrapped while there is room."""
    digits = max((len(str(n.step)) for n in state.notices if n.step is not None), default=0)
    lines: list[Line] = []
    for notice in list(state.notices)[: -_MOST_NEWS - 1 : -1]:
        more = _notice_lines(notice, width, digits)
        if len(lines) + len(more) > room:
            if not lines:
                lines = more[:room]
            break
        lines = [*more, *lines]
    return lines


def _notice_lines(notice: Notice, width: int, digits: int) -> list[Line]:
    level, text = notice.message.level, notice.message.text
    style = _LEVEL_STYLE[level]
    line = Line(f"{_LEVEL_MARK[level]} ", style)
    if notice.step is not None:
        line.add(f"step {notice.step:>{digits}}  ", LABEL)
    if notice.times > 1:
        # First: the end of a long sentence may be cut off.
        line.add(f"({notice.times} times) ", LABEL)
    if line.width + cell_len(text) <= width:
        return [line.add(text, style)]
    first, *others = _wrapped(text, max(width - line.width, _MIN_WIDTH // 2), max(width - 2, _MIN_WIDTH // 2))
    return [line.add(first, style), *(Line("  ").add(other, style) for other in others)]


def _wrapped(text: str, first: int, width: int) -> list[str]:
    """The text wrapped to `width` columns, the first row to `first`. A word that is too long is broken."""
    rows, row, room = [], "", first
    for word in text.split(" "):
        while cell_len(f"{row} {word}" if row else word) > room:
            if row or room != width:
                rows.append(row)
                row, room = "", width
                continue
            fits = next(n for n in range(len(word), 0, -1) if cell_len(word[:n]) <= width)
            rows.append(word[:fits])
            word = word[fits:]
        row = f"{row} {word}" if row else word
    return [*rows, row]
