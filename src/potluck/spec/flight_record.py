"""The lines of a flight record: what a machine sent, received and noted before a fault. PURE.

The tables in docs/reference/run-folder.md are generated from this file.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from potluck.bounds import Finite, Natural, Positive, Text, Whole

Direction = Literal["in", "out", "event"]


class FlightHead(Struct, frozen=True, kw_only=True):
    """The first line."""

    flight: Text
    """The machine that wrote the record."""
    why: Text
    """The fault."""
    at: Text
    """Time of the record in UTC, as 2026-11-18T09:30:00Z."""
    t_s: Finite
    """The same on the clock of `events.jsonl`."""
    clock_s: Finite
    """This machine's monotonic clock when `t_s` was 0, as in `run_start`."""


class FlightEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every other line: a message or an event, with the numbers that it has. Equal messages in a row are one line,
    with the numbers of the last one. What does not apply is absent."""

    t_s: Finite
    """Time on the clock of `events.jsonl`."""
    dir: Direction
    """Whether it was received, sent, or an event of this machine."""
    machine: Text
    """The other machine."""
    kind: Text
    """Kind of the message or of the event."""
    lease: Whole | None = None
    check: Whole | None = None
    step: Whole | None = None
    version: Whole | None = None
    base: Whole | None = None
    piece: Whole | None = None
    batch: Whole | None = None
    count: Whole | None = None
    keep: Whole | None = None
    computed: Whole | None = None
    samples: Whole | None = None
    address: Text = ""
    reason: Text = ""
    bytes: Natural = 0
    """Bytes of its frames besides the header."""
    times: Positive = 1
    """Number of equal messages."""
    until_s: Finite | None = None
    """When the last of them came."""
