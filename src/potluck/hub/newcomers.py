"""Limits the events about guests that have not joined: there can be any number of them. PURE."""

from __future__ import annotations

from potluck.hub.actions import Action, Emit
from potluck.spec.events import RunEvent, RunNote

MOST_EVENTS, WITHIN_S = 200, 60.0
"""At most this many events in this many seconds. A house full of machines needs fewer."""


class Newcomers:
    """Passes events up to the limit and counts the others."""

    def __init__(self) -> None:
        self.now = 0.0
        """In the host's monotonic clock."""
        self._left = float(MOST_EVENTS)
        self._at = 0.0
        self._omitted = 0

    def told(self, event: RunEvent) -> list[Action]:
        """What is logged for an event: the event, nothing, or first the number of events that were left out."""
        passed_s, self._at = max(0.0, self.now - self._at), self.now
        self._left = min(float(MOST_EVENTS), self._left + passed_s * MOST_EVENTS / WITHIN_S)
        # Where some were left out, wait until there is room for several again: one line tells of many.
        if self._left < (MOST_EVENTS / 10 if self._omitted else 1):
            self._omitted += 1
            return []
        self._left -= 1
        omitted, self._omitted = self._omitted, 0
        text = f"{omitted} more hellos, refusals and departures of guests that had not joined are not in the log"
        return [*([Emit(event=RunNote(text=text))] if omitted else []), Emit(event=event)]
