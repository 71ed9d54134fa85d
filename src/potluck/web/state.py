"""The state of a run after some of its events, for the page. The figures are those of `potluck report`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct, structs

from potluck.bounds import Finite, Named, Text
from potluck.report.data_wait import data_text
from potluck.report.sentences import eta_text, loss_text
from potluck.report.state import MachineRow, RunState
from potluck.report.summary import NO_END, Summary, Totals
from potluck.report.summary_text import HEADER, gain_text, machine_cells, summary_facts
from potluck.report.text import clean
from potluck.spec.events import (
    Delivered,
    GuestEnded,
    HostBack,
    HostGone,
    MachineFigures,
    RunEnded,
    RunEvent,
    RunStarted,
    StepEnded,
)
from potluck.train.gain import RECENT_STEPS
from potluck.units import bits_text, count_text, percent_text, rate_text, seconds_text
from potluck.web.content import (
    Bar,
    Curves,
    Headline,
    Page,
    PageMachine,
    PageNotice,
    TimelineRow,
    TimelineStep,
)
from potluck.web.curves import Series
from potluck.web.helping import helping

MOST_NOTICES = 200
MOST_GONE = 16
LAST_STEPS = 24
"""Steps in the timeline."""
HOST_GONE = "host gone"
"""The end of a run whose process ended without a last event."""
CURVES = ("loss", "samples/s", "speed-up")
PLANNED = "Predicted by the plan's cost model from the speeds and links measured in this run."
NO_GUESTS = "No guest has joined. The run printed the line to type on other machines."
MEASURED = "From the time that the steps of this run waited for their samples."


class GuestNow(Struct, frozen=True, kw_only=True):
    """A guest's state at one moment."""

    state: Text
    doing: Text
    """What it is doing, or why it is in this state."""
    heard_s: Finite
    """Seconds since the host last heard from the machine."""


class Pulse(Struct, frozen=True, kw_only=True):
    """What the host sends its page every second, in addition to events."""

    guests: Named[GuestNow] = {}


class GuestAbout(Struct, frozen=True, kw_only=True):
    """A guest's part in a run, for its own page."""

    host: Text
    run: Text
    name: Text
    device: Text


class PageState:
    """Call `fold` with events; `page` is the resulting page."""

    def __init__(
        self,
        guest: GuestAbout | None = None,
        planned_s: float | None = None,
        planned_alone_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.run = RunState(notices=MOST_NOTICES)
        self.curves = Series(len(CURVES))
        self.last_steps: deque[StepEnded] = deque(maxlen=LAST_STEPS)
        self.links: dict[str, float] = {}
        """Bytes per second to each guest, where known."""
        self._pulse = Pulse(), clock()
        """The host's last report about its guests, and its time."""
        self._step_at: float | None = None
        """When the last step ended, if a run that is alive made it."""
        self.guest_of = clean(guest.run) if guest is not None else ""
        """The run that a guest is in."""
        self._guest, self._planned_s, self._planned_alone_s = guest, planned_s, planned_alone_s
        self._totals = Totals()
        self._gone: dict[str, MachineRow] = {}
        self._notices = 0
        self.delivered: Delivered | None = None
        """A guest's last contribution."""
        self._host_gone: HostGone | None = None
        self._over = False
        self._stopped = False
        self._resumes = False
        self._end_before: RunEnded | None = None

    def hear(self, pulse: Pulse) -> None:
        """Set the host's present state of its guests. Callable from any thread."""
        self._pulse = pulse, self._clock()

    def stop(self) -> None:
        """The process that wrote the log is gone: no event will come."""
        self._stopped = True
        if self._resumes:  # it ended before it did anything
            self.run.end = self._end_before

    def resume(self) -> None:
        """All folded events are from earlier processes: a new one resumes the run, and has not started yet."""
        if self.run.start is None:
            return
        self._resumes, self._step_at = True, None
        self._end_before, self.run.end = self.run.end, None
        before = {row.name: row for row in self.run.machines}
        host = (row for row in self.run.machines if row.role == "host")
        self.run.machines = [replace(row, state="starting", reason="", samples=0) for row in host]
        self._remember_gone(before)

    @property
    def ended(self) -> str:
        """How the run ended, as the report says it; empty while it runs."""
        if self.run.end is not None:
            return clean(self.run.end.reason) or "ended"
        return HOST_GONE if self._stopped and self.run.start is not None else ""

    def _now(self, row: MachineRow) -> tuple[GuestNow, float] | None:
        """The host's last report about a connected guest, and its time."""
        pulse, at = self._pulse
        there = row.role != "host" and row.state != "gone" and not self.ended
        now = pulse.guests.get(row.name) if there else None
        return None if now is None else (now, at)

    def heard(self, row: MachineRow) -> float | None:
        """Seconds since the host last heard from a guest, if it is connected."""
        found = self._now(row)
        return None if found is None else round(found[0].heard_s + self._clock() - found[1], 1)

    def undone_after(self, event: RunEvent) -> int | None:
        """If a resumed run repeats steps that were counted: the last step that remains valid. Then fold everything
        again."""
        last = None
        if isinstance(event, RunStarted):
            last = event.resumed_from
        elif isinstance(event, StepEnded):
            last = event.step - 1
        return last if last is not None and last < self._totals.steps else None

    def summary(self, *, live: bool = False) -> Summary:
        """The report's figures. `live`: it is known whether the process still runs, which its log does not say."""
        found = self._totals.summary()
        alone = len(found.machines) < 2 and self._planned_alone_s is not None
        found = structs.replace(found, planned_s=self._planned_alone_s if alone else self._planned_s)
        now = "resuming" if self._resumes else "still going"
        return structs.replace(found, ended=self.ended or now) if live else found

    def pass_over(self, event: RunEvent) -> None:
        """A step that a resumed run repeats: only its time counts."""
        self._totals.pass_over(event)

    def fold(self, event: RunEvent) -> None:
        self._totals.fold(event)
        if self._guest is None:  # a guest's log has no start
            event = structs.replace(event, t_s=self._totals.run_s)
        before, known = {row.name: row for row in self.run.machines}, len(self.run.notices)
        last = self.run.notices[-1] if known else None
        self.run.fold(event)
        self._notices += bool(self.run.notices) and self.run.notices[-1] is not last
        match event:
            case RunStarted():
                self._step_at, self._resumes = None, False
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
        self.delivered = event

    def _remember_gone(self, before: Mapping[str, MachineRow]) -> None:
        """A step's event has only the present machines; those that left are shown for longer."""
        there = {row.name for row in self.run.machines}
        for row in (*before.values(), *self.run.machines):
            if row.state == "gone" or row.name not in there:
                self._gone.pop(row.name, None)
                self._gone[row.name] = (
                    row if row.state == "gone" else replace(row, state="gone", samples=0, reason="")
                )
        for name in [row.name for row in self.run.machines if row.state != "gone" and row.name in self._gone]:
            del self._gone[name]
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    # -- the page ---------------------------------------------------------------------------------------

    def page(
        self, *, live: bool = False, moment: str = "", steps_after: int = 0, advice: Sequence[str] | None = None
    ) -> Page:
        """`moment`: of a page of a live run that nothing follows, the time at which it was made. `steps_after`: the
        timeline has only later steps. `advice`: what would help; computed if not given."""
        summary, status = self.summary(live=live), self.status()
        if not live and not self.ended:
            status = NO_END, "warn"
        since_s = self._clock() - self._step_at if live and self._step_at is not None and not self.ended else None
        return Page(
            kind="run" if self._guest is None else "guest",
            over=not live or self._stopped or bool(moment),
            moment=moment or None,
            title=self._title(summary),
            about=self._about(),
            status=status[0],
            level=status[1],
            headlines=self._headlines(summary, status[0]),
            machines=self.machines(live=live),
            no_guests=NO_GUESTS if live and not self.ended and self.run.start and self.run.start.join else None,
            facts=tuple(summary_facts(summary)) if self._guest is None and self.run.start is not None else (),
            header=HEADER,
            table=tuple(machine_cells(summary.machines)),
            advice=tuple(self.helping() if advice is None else advice),
            advice_from=PLANNED if data_text(summary) is None else MEASURED,
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
            since_step_s=None if since_s is None else round(since_s, 1),
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
            return "It waits for guests, or its script has not reached the training loop."
        size = f"{count_text(start.parameters)} parameters"
        if start.trained_parameters != start.parameters:
            size += f" ({count_text(start.trained_parameters)} trained)"
        codec = f", codec {clean(start.codec)}" if start.join else ""
        return f"{clean(start.recipe)}, {size}, {start.global_batch} samples a step{codec}"

    def status(self) -> tuple[str, str]:
        if self._guest is not None:
            if self._over or self._stopped:
                return "left the run", "info"
            if self._host_gone is not None:
                return f"host gone for {seconds_text(self._host_gone.seconds)}", "bad"
            return ("in the run", "good") if self.delivered else ("waiting for work", "info")
        if self.ended:
            return self.ended, {"finished": "good", "failed": "bad", HOST_GONE: "bad"}.get(self.ended, "warn")
        if self.run.start is None or self._resumes:
            return "resuming" if self._resumes else "not begun", "info"
        return ("training", "good") if self.run.step is not None else ("first step", "info")

    def _headlines(self, summary: Summary, status: str) -> tuple[Headline, ...]:
        if self._guest is not None:
            return self._guest_headlines()
        step = self.run.step
        if step is None:
            return ()
        of = f" / {summary.planned_steps}" if summary.planned_steps else ""
        going = status == "training"
        left = f"{eta_text(step.eta_s)} left" if step.eta_s and going else status
        now = f"{_bare(step.samples_per_s)} in the last {RECENT_STEPS} steps" if going else "over the whole run"
        made = [
            Headline(label="step", value=f"{summary.steps}{of}", note=left),
            Headline(
                label="loss", value=loss_text(summary.last_loss), note=f"{loss_text(summary.first_loss)} at first"
            ),
            Headline(label="samples/s", value=_bare(summary.samples_per_s), note=now),
        ]
        if summary.speedup is not None and len(summary.machines) > 1:
            value, note = gain_text(summary.speedup, summary.speedup_margin), "the host alone"
            if step.speedup is not None and going:
                note += f"; {step.speedup:.2f}× in the last {RECENT_STEPS} steps"
            made.append(Headline(label="speed-up", value=value, note=note))
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

    def machines(self, *, live: bool = True) -> tuple[PageMachine, ...]:
        rows = self.rows(live=live)
        total = sum(row.samples for row in rows)
        return tuple(
            PageMachine(
                name=row.name,
                role=row.role,
                device=row.device,
                state=row.state,
                reason=row.reason,
                share=percent_text(row.samples / total if total else 0.0),
                samples=row.samples,
                rate=rate_text(row.rate) if row.rate is not None else "",
                busy=percent_text(row.busy) if row.busy is not None and row.samples else "",
                link=bits_text(self.links[row.name]) if row.name in self.links and row.state != "gone" else "",
                heard_s=self.heard(row),
            )
            for row in rows
        )

    def rows(self, *, live: bool = True) -> list[MachineRow]:
        """The present machines, and those that left last. Not `live`: as of the last line."""
        if self._guest is not None:
            over = self._over or self._stopped
            state = "waiting" if self._host_gone is not None and not over else self.status()[0]
            rate = self.curves.rows[-1][7] if self.curves.rows else None
            me = MachineRow(name=clean(self._guest.name), device=clean(self._guest.device), rate=rate, state=state)
            host = "gone" if self._host_gone is not None else "was connected" if over else "connected"
            return [MachineRow(name=clean(self._guest.host), role="host", state=host), me]
        there = [self._as_of_now(row, live) for row in self.run.machines]
        names = {row.name for row in there}
        return [*there, *(row for row in self._gone.values() if row.name not in names)]

    def _as_of_now(self, row: MachineRow, live: bool) -> MachineRow:
        found = self._now(row)
        if found is not None:
            return replace(row, state=found[0].state, reason=found[0].doing)
        unknown = row.state != "gone" and self.run.end is None and (self._stopped or not live)
        return replace(row, state=f"was {row.state}") if unknown else row

    def helping(self) -> list[str]:
        """What would help most. Takes about 0.1 s with several guests."""
        start, step = self.run.start, self.run.step
        if (waiting := data_text(self._totals.summary())) is not None:
            return [waiting]
        return helping(start, step, self.links) if start is not None and step is not None else []

    # -- on a guest -------------------------------------------------------------------------------------

    def _guest_headlines(self) -> tuple[Headline, ...]:
        now = self.delivered
        if now is None:
            return ()
        rate = now.samples / now.compute_s if now.compute_s else None
        return (
            Headline(label="step", value=str(now.step), note=f"{now.samples} samples in the last lease"),
            Headline(label="loss", value=loss_text(now.loss), note="of these samples"),
            Headline(label="samples/s", value=_bare(rate), note="while it computes"),
            Headline(label="brought", value=count_text(now.total_samples), note="samples so far"),
        )


def _bare(rate: float | None) -> str:
    """A rate without its unit."""
    return rate_text(rate).removesuffix("/s").strip()


def timeline_step(event: StepEnded) -> TimelineStep:
    total = sum(m.samples for m in event.machines)
    rows = []
    for machine in event.machines:
        bars = _host_bars(event, machine) if machine.role == "host" else _guest_bars(event, machine)
        note = percent_text(machine.samples / total) if machine.samples and total else clean(machine.state)
        clipped = (Bar(b.kind, round(max(0.0, b.start_s), 4), round(min(event.step_s, b.end_s), 4)) for b in bars)
        rows.append(
            TimelineRow(name=clean(machine.name), note=note, bars=tuple(b for b in clipped if b.end_s > b.start_s))
        )
    return TimelineStep(step=event.step, seconds=round(event.step_s, 4), rows=tuple(rows))


def _host_bars(event: StepEnded, machine: MachineFigures) -> Sequence[Bar]:
    """The host's bars: it waits for data, computes, waits for the last leases, updates."""
    updating_s = event.step_s - event.update_s
    waiting_s = updating_s - event.wait_s
    busy_s = (machine.busy or 0.0) * event.step_s
    return (
        Bar("wait", 0.0, event.data_s),
        Bar("compute", max(0.0, waiting_s - busy_s), waiting_s),
        Bar("wait", waiting_s, updating_s),
        Bar("update", updating_s, event.step_s),
    )


def _guest_bars(event: StepEnded, machine: MachineFigures) -> Sequence[Bar]:
    """A guest's bars: it receives the weights' change, computes, and sends its gradient. The lengths and the end
    are measured."""
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
