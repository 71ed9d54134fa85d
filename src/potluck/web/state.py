"""What is known of a run after some of its events, as the page shows it. The figures are `potluck report`'s."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct, structs

from potluck.report.messages import eta_text, loss_text
from potluck.report.state import MachineRow, RunState
from potluck.report.summary import Summary, Totals
from potluck.report.summary_text import HEADER, gain_text, machine_cells, summary_facts
from potluck.report.text import clean
from potluck.spec.events import (
    Delivered,
    GuestEnded,
    HostBack,
    HostGone,
    MachineFigures,
    RunEvent,
    RunStarted,
    StepEnded,
)
from potluck.units import bits_text, count_text, percent_text, rate_text, seconds_text
from potluck.web.content import (
    Bar,
    Curves,
    Headline,
    Lane,
    Page,
    PageMachine,
    PageNotice,
    TimelineStep,
)
from potluck.web.helping import helping
from potluck.web.series import Series

MOST_NOTICES = 200
MOST_GONE = 16
LAST_STEPS = 24
"""Steps in the timeline."""
CURVES = ("loss", "samples/s", "speed-up")


class GuestNow(Struct, frozen=True, kw_only=True):
    """A guest at a moment."""

    state: str
    doing: str
    """What it is doing, or why it is in this state."""
    heard_s: float
    """Seconds since the host last heard from it."""


class Pulse(Struct, frozen=True, kw_only=True):
    """What the host tells its page every second, which no event says."""

    guests: dict[str, GuestNow] = {}


class GuestAbout(Struct, frozen=True, kw_only=True):
    """A guest's part in a run: what its own page is about."""

    host: str
    run: str
    name: str
    device: str


class PageState:
    """Fold events with `fold`; `page` is what they amount to."""

    def __init__(
        self,
        guest: GuestAbout | None = None,
        planned_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.run = RunState(notices=MOST_NOTICES)
        self.curves = Series(len(CURVES))
        self.last_steps: deque[StepEnded] = deque(maxlen=LAST_STEPS)
        self.links: dict[str, float] = {}
        """Bytes per second to each guest, where known."""
        self._pulse = Pulse()
        self._pulse_at = self._step_at = clock()
        self._guest, self._planned_s = guest, planned_s
        self._totals = Totals()
        self._gone: dict[str, MachineRow] = {}
        self._before_s = self._last_s = 0.0
        """Seconds of the processes before this one, as a resumed run has them."""
        self._notices = 0
        self._delivered: Delivered | None = None
        self._host_gone: HostGone | None = None
        self._over = False

    def hear(self, pulse: Pulse) -> None:
        """What the host knows of its guests right now."""
        self._pulse, self._pulse_at = pulse, self._clock()

    def heard(self, row: MachineRow) -> float | None:
        """Seconds since the host last heard from a guest, if it is there."""
        now = self._pulse.guests.get(row.name) if row.role != "host" and row.state != "gone" else None
        return None if now is None else round(now.heard_s + self._clock() - self._pulse_at, 1)

    def undone_by(self, event: RunEvent) -> bool:
        """Whether a resumed run repeats steps that are counted here: then all is to be folded anew."""
        if isinstance(event, RunStarted):
            return event.resumed_from is not None and event.resumed_from < self._totals.steps
        return isinstance(event, StepEnded) and event.step <= self._totals.steps

    def summary(self) -> Summary:
        return structs.replace(self._totals.summary(), planned_s=self._planned_s)

    def pass_over(self, event: RunEvent) -> None:
        """A step that a resumed run repeats: only its time counts."""
        self._totals.pass_over(event)
        self._pass_time(event)

    def _pass_time(self, event: RunEvent) -> None:
        if event.t_s < self._last_s - 1:
            self._before_s += self._last_s
        self._last_s = event.t_s

    def fold(self, event: RunEvent) -> None:
        self._totals.fold(event)
        self._pass_time(event)
        event = structs.replace(event, t_s=self._before_s + event.t_s)
        before, known = {row.name: row for row in self.run.machines}, len(self.run.notices)
        last = self.run.notices[-1] if known else None
        self.run.fold(event)
        self._notices += bool(self.run.notices) and self.run.notices[-1] is not last
        match event:
            case StepEnded():
                self._step(event)
            case Delivered():
                self._deliver(event)
            case HostGone():
                self._host_gone = event
            case HostBack():
                self._host_gone = None
            case GuestEnded():
                self._over = True
        self._remember_gone(before)

    def _step(self, event: StepEnded) -> None:
        self.curves.add(event.step, event.t_s, (event.loss, event.samples_per_s, event.speedup))
        self.last_steps.append(event)
        self._step_at = self._clock()
        for machine in event.machines:
            if machine.link_bytes_per_s is not None:
                self.links[clean(machine.name)] = machine.link_bytes_per_s

    def _deliver(self, event: Delivered) -> None:
        rate = event.samples / event.compute_s if event.compute_s else None
        self.curves.add(event.step, event.t_s, (event.loss, rate, None))
        self._delivered = event

    def _remember_gone(self, before: Mapping[str, MachineRow]) -> None:
        """A step's event has only those who are there; who left is shown for longer."""
        there = {row.name for row in self.run.machines}
        for row in (*before.values(), *self.run.machines):
            if row.state == "gone" or row.name not in there:
                self._gone.pop(row.name, None)
                self._gone[row.name] = row if row.state == "gone" else replace(row, state="gone", samples=0)
        for name in [row.name for row in self.run.machines if row.state != "gone" and row.name in self._gone]:
            del self._gone[name]
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    # -- the page ---------------------------------------------------------------------------------------

    def page(self, *, live: bool = False, steps_after: int = 0, advice: Sequence[str] | None = None) -> Page:
        """`steps_after`: the timeline has only later steps. `advice`: what would help; computed if not given."""
        summary, status = self.summary(), self.status()
        if not live and self.run.end is None:
            status = "no end in the log", "warn"
        return Page(
            kind="run" if self._guest is None else "guest",
            live=live,
            title=self._title(summary),
            about=self._about(),
            status=status[0],
            level=status[1],
            headlines=self._headlines(summary, status[0]),
            machines=self.machines(),
            facts=tuple(summary_facts(summary)) if self._guest is None else self._guest_facts(),
            header=HEADER,
            table=tuple(machine_cells(summary.machines)),
            advice=self._advice(self.helping() if advice is None else advice),
            notices=tuple(
                PageNotice(
                    t_s=round(n.t_s, 1),
                    step=n.step,
                    level=n.message.level,
                    text=n.message.text,
                    times=n.times,
                )
                for n in self.run.notices
            ),
            more_notices=max(0, self._notices - sum(n.times for n in self.run.notices)),
            curves=Curves(labels=CURVES, rows=self.curves.rows, merged=self.curves.merges > 0),
            since_step_s=round(self._clock() - self._step_at, 1) if live and self.run.step is not None else None,
            steps=tuple(timeline_step(step) for step in self.last_steps if step.step > steps_after),
        )

    def _title(self, summary: Summary) -> str:
        if self._guest is not None:
            return f"{clean(self._guest.name)} helps {clean(self._guest.host)}"
        return summary.run_id or "a run that has not begun"

    def _about(self) -> str:
        start = self.run.start
        if self._guest is not None:
            return f"run {clean(self._guest.run)}, on {clean(self._guest.device)}"
        if start is None:
            return ""
        size = f"{count_text(start.parameters)} parameters"
        if start.trained_parameters != start.parameters:
            size += f" ({count_text(start.trained_parameters)} trained)"
        return f"{clean(start.recipe)}, {size}, {start.global_batch} samples a step, codec {clean(start.codec)}"

    def status(self) -> tuple[str, str]:
        if self._guest is not None:
            if self._over:
                return "left the run", "info"
            if self._host_gone is not None:
                return f"host gone for {seconds_text(self._host_gone.seconds)}", "bad"
            return ("computing", "good") if self._delivered else ("waiting for work", "info")
        end = self.run.end
        if end is not None:
            reason = clean(end.reason) or "ended"
            return reason, {"finished": "good", "failed": "bad"}.get(reason, "warn")
        if self.run.start is None:
            return "not begun", "info"
        return ("training", "good") if self.run.step is not None else ("first step", "info")

    def _headlines(self, summary: Summary, status: str) -> tuple[Headline, ...]:
        if self._guest is not None:
            return self._guest_headlines()
        step = self.run.step
        if step is None:
            return ()
        of = f" / {step.steps}" if step.steps else ""
        left = f"{eta_text(step.eta_s)} left" if step.eta_s and status == "training" else status
        made = [
            Headline(label="step", value=f"{step.step}{of}", note=left),
            Headline(label="loss", value=loss_text(step.loss), note=f"{loss_text(summary.first_loss)} at first"),
            Headline(
                label="samples/s",
                value=rate_text(step.samples_per_s).removesuffix("/s").strip(),
                note=f"{rate_text(step.tokens_per_s, 'tokens')}" if step.tokens_per_s else "over 8 steps",
            ),
        ]
        if summary.speedup is not None:
            value = gain_text(summary.speedup, summary.speedup_margin)
            now = f"the host alone; now {step.speedup:.2f}×" if step.speedup is not None else "the host alone"
            made.append(Headline(label="speed-up", value=value, note=now))
        off = "median"
        if summary.predicted_s is not None:
            off += f"; predicted {seconds_text(summary.predicted_s)}"
        if summary.planned_s is not None:
            off += f", planned {seconds_text(summary.planned_s)}"
        made.append(Headline(label="a step takes", value=seconds_text(summary.step_s), note=off))
        if summary.efficiency is not None and len(summary.machines) > 1:
            value, note = f"{summary.efficiency:.3f}", "of the machines' summed speed"
            made.append(Headline(label="efficiency", value=value, note=note))
        return tuple(made)

    def machines(self) -> tuple[PageMachine, ...]:
        rows = self.rows()
        total = sum(row.samples for row in rows)
        return tuple(
            PageMachine(
                name=row.name,
                role=row.role,
                device=row.device,
                state=row.state,
                reason=row.reason,
                share=round(row.samples / total, 4) if total else 0.0,
                samples=row.samples,
                rate=rate_text(row.rate) if row.rate is not None else "",
                busy=None if row.busy is None or not row.samples else round(row.busy, 3),
                link=bits_text(self.links[row.name]) if row.name in self.links and row.state != "gone" else "",
                heard_s=self.heard(row),
            )
            for row in rows
        )

    def rows(self) -> list[MachineRow]:
        """The machines that are there, as of now, and those that left last."""
        if self._guest is not None:
            state = self.status()[0]
            rate = self.curves.rows[-1][7] if self.curves.rows else None
            me = MachineRow(name=clean(self._guest.name), device=clean(self._guest.device), rate=rate, state=state)
            return [MachineRow(name=clean(self._guest.host), role="host", state="host"), me]
        there = [self._as_of_now(row) for row in self.run.machines]
        names = {row.name for row in there}
        return [*there, *(row for row in self._gone.values() if row.name not in names)]

    def _as_of_now(self, row: MachineRow) -> MachineRow:
        now = self._pulse.guests.get(row.name) if row.role != "host" and row.state != "gone" else None
        return row if now is None or self.run.end else replace(row, state=now.state, reason=now.doing)

    def helping(self) -> list[str]:
        """What would help most. Takes about 0.1 s with several guests."""
        start, step = self.run.start, self.run.step
        return helping(start, step, self.links) if start is not None and step is not None else []

    def _advice(self, helps: Sequence[str]) -> tuple[PageNotice, ...]:
        """Why guests sit out, and what would help most."""
        found = [
            PageNotice(t_s=0, step=None, level="warn", text=f"{row.name} sits out: {row.reason or 'not known why'}")
            for row in self.rows()
            if row.state == "sitting out"
        ]
        return (*found, *(PageNotice(t_s=0, step=None, level="info", text=text) for text in helps))

    # -- on a guest -------------------------------------------------------------------------------------

    def _guest_headlines(self) -> tuple[Headline, ...]:
        now = self._delivered
        if now is None:
            return ()
        rate = now.samples / now.compute_s if now.compute_s else None
        return (
            Headline(label="step", value=str(now.step), note=f"{now.samples} samples in the last lease"),
            Headline(label="loss", value=loss_text(now.loss), note="of these samples"),
            Headline(label="samples/s", value=rate_text(rate).removesuffix("/s").strip(), note="while it computes"),
            Headline(label="brought", value=count_text(now.total_samples), note="samples so far"),
        )

    def _guest_facts(self) -> tuple[tuple[str, str], ...]:
        assert self._guest is not None
        total = self._delivered.total_samples if self._delivered is not None else 0
        return (
            ("run", clean(self._guest.run)),
            ("host", clean(self._guest.host)),
            ("device", clean(self._guest.device)),
            ("samples", f"{total} brought by this machine"),
        )


def timeline_step(event: StepEnded) -> TimelineStep:
    total = sum(m.samples for m in event.machines)
    lanes = []
    for machine in event.machines:
        bars = _host_bars(event, machine) if machine.role == "host" else _guest_bars(event, machine)
        note = percent_text(machine.samples / total) if machine.samples and total else clean(machine.state)
        clipped = (Bar(b.kind, round(max(0.0, b.start_s), 4), round(min(event.step_s, b.end_s), 4)) for b in bars)
        lanes.append(
            Lane(name=clean(machine.name), note=note, bars=tuple(b for b in clipped if b.end_s > b.start_s))
        )
    return TimelineStep(step=event.step, seconds=round(event.step_s, 4), lanes=tuple(lanes))


def _host_bars(event: StepEnded, machine: MachineFigures) -> Sequence[Bar]:
    """It computes, waits for the last leases, updates."""
    updating_s = event.step_s - event.update_s
    waiting_s = updating_s - event.wait_s
    busy_s = (machine.busy or 0.0) * event.step_s
    return (
        Bar("compute", max(0.0, waiting_s - busy_s), waiting_s),
        Bar("wait", waiting_s, updating_s),
        Bar("update", updating_s, event.step_s),
    )


def _guest_bars(event: StepEnded, machine: MachineFigures) -> Sequence[Bar]:
    """The weights' change arrives, it computes, its gradient leaves: the lengths and its end are measured."""
    if not machine.samples or machine.answered_s is None:
        return ()
    end_s = min(machine.answered_s, event.step_s)
    sending_s = end_s - (machine.send_s or 0.0)
    busy_s = (machine.busy or 0.0) * event.step_s
    return (
        Bar("wait", 0.0, event.step_s),
        Bar("receive", 0.0, machine.receive_s or 0.0),
        Bar("compute", sending_s - busy_s, sending_s),
        Bar("send", sending_s, end_s),
    )
