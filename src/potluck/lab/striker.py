"""Injects planned faults during a run, and records what the host reports about its guests.

It has no thread: the caller that follows the run calls it several times a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil

from potluck.lab.box import Box
from potluck.lab.shaping import Fault
from potluck.lab.stage import Actor
from potluck.spec.events import (
    GuestJoined,
    GuestLeft,
    GuestLost,
    GuestRefused,
    LeaseTakenBack,
    RunEvent,
    RunStarted,
    StepEnded,
    kind_of,
)
from potluck.spec.faults import LINK_KINDS, PlannedFault
from potluck.spec.outcome import FaultDone, Incident


class Guests(Protocol):
    """The guests that a fault can affect."""

    def actor(self, machine: str) -> Actor | None:
        """The guest's process; None while there is none."""

    def kill(self, machine: str) -> None:
        """Kill its process."""

    def start(self, machine: str) -> None:
        """Start it again."""


class Striker:
    """Faults on a schedule, by steps and by the clock."""

    def __init__(
        self,
        planned: Sequence[PlannedFault],
        box: Box,
        guests: Guests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = list(planned)
        self._box, self._guests, self._clock = box, guests, clock
        self._began: float | None = None
        self._log_began = 0.0
        self._step = 0
        """The current step; 0 before the first."""
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._stopped: set[str] = set()
        self.done: list[FaultDone] = []
        self.incidents: list[Incident] = []

    @property
    def missed(self) -> int:
        return len(self._waiting)

    def saw(self, event: RunEvent) -> None:
        """The host has written a line to its log."""
        match event:
            case RunStarted():
                self._log_began = event.clock_s
                self._began, self._step = self._log_began + event.t_s, 1
            case StepEnded():
                self._step = event.step + 1
            case GuestLost() | GuestLeft() | GuestRefused():
                self._incident(event, event.machine, event.samples_taken_back or 0)
            case LeaseTakenBack():
                self._incident(event, event.machine, event.samples)
            case GuestJoined():
                self._incident(event, event.machine, 0)
        self.tick()

    def _incident(self, event: RunEvent, machine: str, samples: int) -> None:
        """Record the host's events about a guest, once a fault has happened."""
        if self.done:
            at = self._log_began + event.t_s
            self.incidents.append(
                Incident(machine=machine, kind=kind_of(event), at=at, step=self._step, samples=samples)
            )

    def tick(self) -> None:
        """Inject the faults that are due."""
        now = self._clock()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()
        for fault in [fault for fault in self._waiting if self._due(fault, now)]:
            self._waiting.remove(fault)
            self._strike(fault, now)

    def close(self) -> None:
        """The run is over: continue stopped guests, so that they can end in order."""
        self._later.clear()
        for machine in list(self._stopped):
            self._go_on(machine)

    def _due(self, fault: PlannedFault, now: float) -> bool:
        if self._began is None:
            return False
        if fault.at_step is not None:
            return self._step >= fault.at_step
        return now >= self._began + (fault.at_s or 0.0)

    def _strike(self, fault: PlannedFault, now: float) -> None:
        machine, text = str(fault.machine), fault.text
        actor = self._guests.actor(machine)
        if actor is not None:
            actor.expendable = True  # what becomes of it now is what is to be found out
        if fault.kind in LINK_KINDS:
            self._box.add_faults(machine, [_on_the_wire(fault)])
        elif actor is None or actor.process.poll() is not None:
            text = f"{fault.kind}: it was not running"
        elif fault.kind == "kill":
            self._stopped.discard(machine)
            self._guests.kill(machine)
        else:
            self._stop(machine, actor)
            self._later.append((now + fault.for_s, lambda: self._go_on(machine)))
        if fault.kind == "kill" and fault.return_after_s is not None:
            self._later.append((now + fault.return_after_s, lambda: self._start(machine)))
        self.done.append(
            FaultDone(
                machine=machine, kind=fault.kind, step=self._step, start=now, end=now + fault.for_s, text=text
            )
        )

    def _stop(self, machine: str, actor: Actor) -> None:
        self._stopped.add(machine)
        for process in _family(actor):
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def _go_on(self, machine: str) -> None:
        actor = self._guests.actor(machine)
        if machine not in self._stopped or actor is None:
            return
        self._stopped.discard(machine)
        for process in _family(actor):
            with contextlib.suppress(psutil.Error):
                process.resume()

    def _start(self, machine: str) -> None:
        actor = self._guests.actor(machine)
        if actor is None or actor.process.poll() is not None:
            self._guests.start(machine)
            if (actor := self._guests.actor(machine)) is not None:
                actor.expendable = True


def _on_the_wire(fault: PlannedFault) -> Fault:
    assert fault.kind != "stop"
    assert fault.kind != "kill"
    return Fault(kind=fault.kind, at_s=0.0, for_s=fault.for_s, amount=fault.amount, direction=fault.direction)


def _family(actor: Actor) -> list[psutil.Process]:
    try:
        process = psutil.Process(actor.process.pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
