"""What is known of a run after some of its events: the state that the live view draws.

It folds events in order and does not know how they are shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from potluck.report.messages import EventText, describe
from potluck.report.text import clean, integer, number

Event = Mapping[str, Any]

_HISTORY = 512
_MESSAGES = 12
_MACHINES = 128
"""Rows at most: whoever holds the token may come under ever new names, and the next step is the tidying up."""


class History:
    """All values so far in bounded memory: when full, neighbours are merged into their means."""

    def __init__(self, capacity: int = _HISTORY) -> None:
        self.values: list[float] = []
        self._capacity = capacity
        self._covers = 1
        self._sum = 0.0
        self._count = 0

    def append(self, value: float) -> None:
        self._sum += value
        self._count += 1
        if self._count < self._covers:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) >= self._capacity:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2])]
            self._covers *= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """One machine as the last step saw it."""

    name: str
    role: str = "guest"
    device: str = ""
    samples: int = 0
    micro_batch: int = 0
    """The most that it computed at once in the step; 0: unknown."""
    rate: float | None = None
    busy: float | None = None
    state: str = ""
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Notice:
    """A message in the list, with the step it belongs to, and how often it came."""

    message: EventText
    step: int | None
    """None: it came before there was a step."""
    times: int = 1


class RunState:
    """Fold events with `fold`; read the attributes. Not locked: the view does that."""

    def __init__(self) -> None:
        self.start: Event = {}
        self.step: Event = {}
        self.end: Event = {}
        self.losses = History()
        self.not_applied = 0
        """Steps whose update was not made."""
        self.machines: list[MachineRow] = []
        self.notices: deque[Notice] = deque(maxlen=_MESSAGES)

    @property
    def done(self) -> int:
        """Finished steps."""
        return integer(self.step, "step") or integer(self.start, "resumed_from")

    @property
    def steps(self) -> int | None:
        steps = integer(self.step, "steps") or integer(self.start, "steps")
        return steps or None

    @property
    def _under_way(self) -> int | None:
        if not self.start:
            return None
        return self.done + 1 if self.steps is None else min(self.done + 1, self.steps)

    def fold(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "run_start":
            self.start = event
            self.machines = [
                MachineRow(
                    name=clean(event.get("machine")),
                    role="host",
                    device=clean(event.get("device")),
                    state="starting",
                )
            ]
            if integer(event, "resumed_from"):
                text = f"resumed after step {integer(event, 'resumed_from')}"
                self.notices.append(
                    Notice(message=EventText(text=text, level="info", about=("", "", "")), step=None)
                )
        elif kind == "step":
            self.step = event
            self.not_applied += event.get("applied") is False
            loss = number(event, "loss")
            if loss is not None:
                self.losses.append(loss)
            self.machines = [_row(m) for m in event.get("machines") or () if isinstance(m, Mapping)]
        elif kind == "run_end":
            self.end = event
            self.machines = [replace(m, state="done") if m.state == "computing" else m for m in self.machines]
        else:
            self._news(str(kind), event)

    def _news(self, kind: str, event: Event) -> None:
        # Each line begins with the step: a second number in it would only be compared with the first.
        message = describe({key: value for key, value in event.items() if key != "step"})
        if message is None:
            return
        step = integer(event, "step") or self._under_way
        self._touch_machine(kind, event)
        if kind == "guest_hello":
            return  # its row says "joining"; the joining itself, or the refusal, is the news
        for i, notice in enumerate(self.notices):
            if notice.message.about == message.about and kind != "note":
                del self.notices[i]
                self.notices.append(Notice(message=message, step=step, times=notice.times + 1))
                return
        self.notices.append(Notice(message=message, step=step))

    def _touch_machine(self, kind: str, event: Event) -> None:
        """Show a change at once: the next step, which brings every row anew, may be a minute away."""
        state = {
            "guest_hello": "joining",
            "guest_joined": "syncing",
            "guest_left": "gone",
            "guest_lost": "gone",
            "guest_refused": "gone",
            "guest_sits_out": "sitting out",
        }.get(kind)
        name = clean(event.get("machine"))
        if state is None or not name:
            return
        old = next((m for m in self.machines if m.name == name and m.role != "host"), None)
        row = MachineRow(
            name=name,
            device=clean(event.get("device")) or (old.device if old else ""),
            rate=old.rate if old else None,
            state=state,
            reason=clean(event.get("reason")),
        )
        if old is None:
            if len(self.machines) < _MACHINES:
                self.machines.append(row)
        else:
            self.machines[self.machines.index(old)] = row


def _row(machine: Event) -> MachineRow:
    return MachineRow(
        name=clean(machine.get("name")),
        role=clean(machine.get("role")) or "guest",
        device=clean(machine.get("device")),
        samples=integer(machine, "samples"),
        micro_batch=integer(machine, "micro_batch"),
        rate=number(machine, "rate"),
        busy=number(machine, "busy"),
        state=clean(machine.get("state")),
        reason=clean(machine.get("reason")),
    )
