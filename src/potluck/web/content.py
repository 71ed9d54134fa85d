"""The page's content as typed data: the server sends it as JSON, a report contains it."""

from __future__ import annotations

from msgspec import Struct

VERSION = 1


class Headline(Struct, frozen=True, kw_only=True):
    """A large figure."""

    label: str
    value: str
    note: str = ""


class PageMachine(Struct, frozen=True, kw_only=True):
    """A machine in the picture of the fleet."""

    name: str
    role: str
    device: str
    state: str
    reason: str = ""
    share: str = ""
    """The machine's share of the last step's samples."""
    samples: int = 0
    """Its samples in the last step."""
    rate: str = ""
    busy: str = ""
    """The part of the last step in which it computed."""
    link: str = ""
    """Measured rate of its link; empty if not known."""
    heard_s: float | None = None
    """Seconds since the host last heard from it, when this was sent; None if not known."""


class PageNotice(Struct, frozen=True, kw_only=True):
    """An event as a sentence."""

    t_s: float
    step: int | None
    level: str
    text: str
    times: int = 1


class Bar(Struct, frozen=True, array_like=True):
    """A time in which a machine did one thing, in seconds of its timeline."""

    kind: str
    """compute, update, send, receive, wait or fault."""
    start_s: float
    end_s: float


class TimelineRow(Struct, frozen=True, kw_only=True):
    """One machine in a timeline."""

    name: str
    note: str = ""
    bars: tuple[Bar, ...] = ()


class TimelineStep(Struct, frozen=True, kw_only=True):
    """One step, with times since its beginning."""

    step: int
    seconds: float
    rows: tuple[TimelineRow, ...]


class Timeline(Struct, frozen=True, kw_only=True):
    """Steps of one strategy on one time scale: the lab's page has several."""

    title: str
    note: str
    seconds: float
    """Length of the window."""
    marks: tuple[tuple[float, str], ...]
    """Where steps end, with their labels."""
    rows: tuple[TimelineRow, ...]


class Curves(Struct, frozen=True, kw_only=True):
    """Curves over the steps: see `Series`. In an open page, rows from `start` on are replaced."""

    labels: tuple[str, ...]
    rows: list[list[float | None]]
    start: int = 0
    merged: bool = False
    """Whether a row may stand for several steps."""


class Page(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole page. An update has only what changed."""

    version: int = VERSION
    kind: str = ""
    """run, guest or lab."""
    over: bool = False
    """Whether no updates follow: a report, or a run that has ended."""
    title: str | None = None
    about: str | None = None
    status: str | None = None
    """What the run is doing, in a word or two."""
    level: str | None = None
    """The status's colour: good, info, warn or bad."""
    headlines: tuple[Headline, ...] | None = None
    machines: tuple[PageMachine, ...] | None = None
    no_guests: str | None = None
    """Text in the fleet while it has no guests."""
    facts: tuple[tuple[str, str], ...] | None = None
    header: tuple[str, ...] | None = None
    table: tuple[tuple[str, ...], ...] | None = None
    numeric: tuple[int, ...] | None = None
    """Columns of the table with numbers; None: those of the machines."""
    advice: tuple[str, ...] | None = None
    """The suggestions under "What would help"."""
    advice_from: str | None = None
    """The source of the suggestions."""
    notices: tuple[PageNotice, ...] | None = None
    more_notices: int | None = None
    """Number of notices before the first one here."""
    curves: Curves | None = None
    steps: tuple[TimelineStep, ...] | None = None
    """The last steps; for an open page, only those that it does not have."""
    timelines: tuple[Timeline, ...] | None = None
    moment: str | None = None
    """The time of this state, if the run continues and the page does not follow it."""
    since_step_s: float | None = None
    """Seconds since the last step ended, when this was sent."""
