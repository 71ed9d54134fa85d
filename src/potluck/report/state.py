"""The state of a run after some of its events, which the live view draws."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from potluck.report.sentences import EventText, describe
from potluck.report.text import clean
from potluck.spec.events import (
    GuestHello,
    GuestJoined,
    GuestLeft,
    GuestLost,
    GuestRefused,
    GuestSitsOut,
    Logged,
    MachineFigures,
    RunEnded,
    RunEvent,
    RunNote,
    RunStarted,
    StepEnded,
)

_HISTORY = 512
_MESSAGES = 12
_MACHINES = 128
"""The most rows, because a guest with the token may join under any number of names. The next step clears them."""


class History:
    """All values so far in bounded memory: when it is full, each two neighbours are replaced by their mean."""

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
    """One machine's state in the last step."""

    name: str
    role: str = "guest"
    device: str = ""
    samples: int = 0
    micro_batch: int | None = None
    """Most samples computed at once in the step; None: not known."""
    rate: float | None = None
    busy: float | None = None
    state: str = ""
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Notice:
    """A message in the list, with its step and how often it came."""

    message: EventText
    step: int | None
    """None: it came before the first step."""
    times: int = 1
    t_s: float = 0.0
    """When it last came."""


class RunState:
    """Fold events with `fold`; read the attributes. Not locked: the view does that."""

    def __init__(self, notices: int = _MESSAGES) -> None:
        self.start: RunStarted | None = None
        self.step: StepEnded | None = None
        self.end: RunEnded | None = None
        self.losses = History()
        self.logged: dict[str, float | None] = {}
        """The newest value of each name that the script logs."""
        self.not_applied = 0
        """Steps whose update was not applied."""
        self.machines: list[MachineRow] = []
        self.notices: deque[Notice] = deque(maxlen=notices)

    @property
    def done(self) -> int:
        """Finished steps."""
        if self.step is not None:
            return self.step.step
        return (self.start.resumed_from or 0) if self.start is not None else 0

    @property
    def steps(self) -> int | None:
        known = self.step or self.start
        return (known.steps or None) if known is not None else None

    @property
    def _current_step(self) -> int | None:
        if self.start is None:
            return None
        return self.done + 1 if self.steps is None else min(self.done + 1, self.steps)

    def fold(self, event: RunEvent) -> None:
        match event:
            case RunStarted():
                self._started(event)
            case StepEnded():
                self.step = event
                self.not_applied += not event.applied
                if event.loss is not None:
                    self.losses.append(event.loss)
                self.machines = [_row(machine) for machine in event.machines]
            case Logged():
                self.logged = {**self.logged, **event.values}
            case RunEnded():
                self.end = event
                ended = "done" if event.reason == "finished" else "stopped"
                self.machines = [replace(m, state=ended) if m.state == "computing" else m for m in self.machines]
            case _:
                self._news(event)

    def _started(self, event: RunStarted) -> None:
        self.start, self.end = event, None  # a resumed run has not ended
        host = MachineRow(name=clean(event.machine), role="host", device=clean(event.device), state="starting")
        self.machines = [host]
        if event.resumed_from:
            text = f"resumed after step {event.resumed_from}"
            about = EventText(text=text, level="info", about=("", "", ""))
            self.notices.append(Notice(message=about, step=None, t_s=event.t_s))

    def _news(self, event: RunEvent) -> None:
        # The line begins with the step's number: the sentence does not repeat it.
        message = describe(event, with_step=False)
        if message is None:
            return
        step: int | None = getattr(event, "step", None) or self._current_step
        self._touch_machine(event)
        if isinstance(event, GuestHello):
            return  # its row says "joining"; joining itself, or the refusal, is the news
        for i, notice in enumerate(self.notices):
            if notice.message.about == message.about and not isinstance(event, RunNote):
                del self.notices[i]
                self.notices.append(Notice(message=message, step=step, times=notice.times + 1, t_s=event.t_s))
                return
        self.notices.append(Notice(message=message, step=step, t_s=event.t_s))

    def _touch_machine(self, event: RunEvent) -> None:
        """Show a change immediately, because the next step, which renews every row, may be a minute away."""
        device = reason = ""
        match event:
            case GuestHello():
                state, device = "joining", clean(event.device)
            case GuestJoined():
                state, device = "syncing", clean(event.device)
            case GuestLeft() | GuestLost() | GuestRefused():
                state, reason = "gone", clean(event.reason)
            case GuestSitsOut():
                state, reason = "sitting out", clean(event.reason)
            case _:
                return
        name = clean(event.machine)
        old = next((m for m in self.machines if m.name == name and m.role != "host"), None)
        row = MachineRow(
            name=name,
            device=device or (old.device if old else ""),
            rate=old.rate if old else None,
            state=state,
            reason=reason,
        )
        if old is None:
            if len(self.machines) < _MACHINES:
                self.machines.append(row)
        else:
            self.machines[self.machines.index(old)] = row


def _row(machine: MachineFigures) -> MachineRow:
    return MachineRow(
        name=clean(machine.name),
        role=machine.role,
        device=clean(machine.device),
        samples=machine.samples,
        micro_batch=machine.micro_batch,
        rate=machine.rate,
        busy=machine.busy,
        state=clean(machine.state),
        reason=clean(machine.reason),
    )
