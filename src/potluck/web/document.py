"""The page as one HTML document, with style, script and data inside, so that it loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
from collections.abc import Iterable
from importlib import resources

import msgspec

from potluck.report.summary import step_events
from potluck.spec.events import RunEvent, StepEnded
from potluck.web.content import Page
from potluck.web.state import PageState


@functools.cache
def _file(name: str) -> str:
    return resources.files("potluck.web").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def policy() -> str:
    """Content-Security-Policy: our own script and style only, and connections only to where the page came from."""
    script, style = _hash(_file("page.js")), _hash(_file("page.css"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )


def document(page: Page, *, compact: bool = False) -> str:
    """The whole page. `compact`: only its main parts, for a notebook's output."""
    data = msgspec.json.encode(page).decode().replace("<", "\\u003c")  # nothing in it can end its element
    parts = {
        "policy": policy(),
        "style": _file("page.css"),
        "body": ' class="compact"' if compact else "",
        "data": data,
        "script": _file("page.js"),
    }
    made = []
    for piece in _file("page.html").split("{"):
        name, brace, rest = piece.partition("}")
        made.append(parts[name] + rest if brace else piece)
    return "".join(made)


def frame(page: Page) -> str:
    """The compact page in a frame, for a notebook, so that page and notebook cannot affect each other."""
    guests = max(1, min(4, len(page.machines or ()) - 1))  # of more, the others are below: it scrolls
    height = 450 + 92 * guests if page.headlines else 90 + 60 * guests
    inner = html.escape(document(page, compact=True))
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" title="Potluck" srcdoc="{inner}"></iframe>'


def state_of(events: Iterable[RunEvent], planned_s: float | None = None) -> PageState:
    """The state after all events of a log, without steps that a resumed run undid."""
    listed = list(events)
    counts = {id(step) for step in step_events(listed)}
    state = PageState(planned_s=planned_s)
    for event in listed:
        if isinstance(event, StepEnded) and id(event) not in counts:
            state.pass_over(event)
        else:
            state.fold(event)
    return state
