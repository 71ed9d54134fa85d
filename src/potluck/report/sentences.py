"""Events as sentences: what happened to which machine, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from potluck.balance.codecs import INT4, THIN
from potluck.report.text import clean
from potluck.spec import events as ev
from potluck.units import bytes_text, factor_text, rate_text, seconds_text

ENOUGH_FOR_STATISTICS = 32
"""From this many samples on, batch statistics cost a CNN nothing that could be measured: see docs/log.md."""
Level = Literal["good", "info", "warn", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventText:
    """One notable event as text."""

    text: str
    level: Level
    about: tuple[str, str, str]
    """Kind, subject, kind of reason. If space is short, a newer message replaces one about the same."""


def describe(event: ev.RunEvent, *, with_step: bool = True) -> EventText | None:
    """The sentence for an event; None for events without one (steps, start and end have their own texts).

    `with_step=False` leaves out the step's number, if the line already shows it.
    """
    found = _sentence(event, with_step)
    if found is None:
        return None
    level, text = found
    subject = clean(getattr(event, "machine", None) or getattr(event, "address", None))
    return EventText(text=text, level=level, about=(ev.kind_of(event), subject, _kind_of_reason(event)))


def _kind_of_reason(event: ev.RunEvent) -> str:
    """The reason without its figures: silent for 5.1 s and for 5.3 s is the same, a lost connection is not."""
    # A stranger's reason counts the attempts, which may have no end.
    if isinstance(event, ev.StrangerRefused):
        return ""
    return re.sub(r"\d+(\.\d+)?( (µs|ms|s|min|h)\b)?", "#", clean(getattr(event, "reason", None)))


def _sentence(event: ev.RunEvent, with_step: bool) -> tuple[Level, str] | None:
    match event:
        case ev.GuestHello():
            return "info", _with(f"{_who(event)} is joining", event.device)
        case ev.GuestJoined():
            return "good", _joined(event)
        case ev.GuestLeft():
            text = _with(f"{_who(event)} left", event.reason) + _given_back(event.samples_taken_back)
            return "bad" if event.failed else "info", text
        case ev.GuestLost():
            return "bad", _lost(event, with_step)
        case ev.GuestRefused():
            return "bad", _with(f"refused {_who(event)}", event.reason)
        case ev.GuestSitsOut():
            return "warn", _with(f"{_name(event.machine)} sits out", event.reason)
        case ev.GuestCodec():
            return "info", _with(f"{_name(event.machine)} sends its gradients {_coded(event.codec)}", event.reason)
        case ev.LeaseTakenBack():
            return "warn", _during(event, clean(event.reason) or "was late", with_step) + _given_back(event.samples)
        case ev.ContributionDropped():
            return "warn", _with(f"dropped {_samples(event.samples)} of {_name(event.machine)}", event.reason)
        case ev.ReplicaMismatch():
            reason = clean(event.reason) or "held weights that are not the host's"
            lost = _given_back(event.samples)
            return "bad", f"{_during(event, reason, with_step)}{lost}; the weights are sent to it again"
        case ev.StrangerRefused():
            where = clean(event.address) or "an unknown address"
            return "bad", _with(f"refused a connection without the token from {where}", event.reason)
        case _:
            return _about_run(event, with_step)


def _about_run(event: ev.RunEvent, with_step: bool) -> tuple[Level, str] | None:
    match event:
        case ev.StepNotApplied():
            return "bad", _not_applied(event, with_step)
        case ev.CheckpointSaved():
            return "info", f"saved {clean(event.path)} in {seconds_text(event.seconds)}"
        case ev.CheckpointFailed():
            again = "; tries again at the next interval" if event.again else ""
            return "bad", _with(f"step {event.step} is not saved", event.reason) + again
        case ev.CheckpointDamaged():
            then = f"; continues after step {event.resumed_from}" if event.resumed_from else ""
            return "bad", _with(f"{clean(event.path)} is damaged", event.reason) + then
        case ev.FlightRecorded():
            text = f"for a bug report, the last messages: {clean(event.path)}"
            return ("info", text) if event.first else None
        case ev.LoopAwaited():
            return "warn", _loop_awaited(event)
        case ev.LogFailed():
            text = _with(f"cannot write to {clean(event.path)}", event.reason)
            return "bad", f"{text}; the run continues, its log has a gap"
        case ev.LogGap():
            return "warn", f"the log lacks {event.lines} lines here: they could not be written"
        case ev.StatisticsMeasured():
            enough = event.effective_batch >= min(ENOUGH_FOR_STATISTICS, event.global_batch)
            return "info" if enough else "warn", _statistics(event)
        case ev.Logged():
            return "info", f"step {event.step}: {values_text(event.values)}"
        case ev.RunNote():
            return "info", clean(event.text)
        case _:
            return None


def steps_text(event: ev.StepEnded) -> str:
    """'12/300', or '12' in a run without an end."""
    return f"{event.step:>{len(str(event.steps))}}/{event.steps}" if event.steps else str(event.step)


def loss_text(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.3e}"


def values_text(values: Mapping[str, float | None]) -> str:
    """'accuracy 0.9312  best 12'."""
    return "  ".join(f"{clean(name, 40)} {_value_text(value)}" for name, value in values.items())


def _value_text(value: float | None) -> str:
    small = value is not None and 0 < abs(value) < 0.001  # a learning rate
    return f"{value:.3g}" if small or (value is not None and value == int(value)) else loss_text(value)


def eta_text(seconds: float) -> str:
    """Whole seconds, because tenths that change all the time say nothing."""
    return seconds_text(seconds) if seconds >= 59.5 else f"{seconds:.0f} s"


def end_text(event: ev.RunEnded) -> str:
    """The last line of a run."""
    parts = [f"{clean(event.reason) or 'ended'} after step {event.step}, {seconds_text(event.seconds)}"]
    if event.loss is not msgspec.UNSET:
        parts.append(f"loss {loss_text(event.loss)}")
    if event.not_applied:
        parts.append(f"{not_applied_text(event.not_applied)} not applied")
    parts.append(rate_text(event.samples_per_s, "samples"))
    if event.speedup is not None:
        parts.append(f"{factor_text(event.speedup)} this machine alone")
    return ", ".join(parts)


def wire_text(bytes_up: int, bytes_down: int) -> str:
    """What guests sent and received. A guest without the data also receives its samples."""
    return f"{bytes_text(bytes_up)} of gradients in, {bytes_text(bytes_down)} of weights and samples out"


def not_applied_text(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"


# -- parts of sentences ---------------------------------------------------------------------------------

_Fault = ev.GuestLost | ev.LeaseTakenBack | ev.ReplicaMismatch


def _name(machine: str | None) -> str:
    return clean(machine) or "a guest"


def _who(event: _Fault | ev.GuestHello | ev.GuestJoined | ev.GuestLeft | ev.GuestRefused) -> str:
    """The guest with its address, to distinguish two laptops."""
    address = clean(event.address)
    return f"{_name(event.machine)} ({address})" if address else _name(event.machine)


def _with(text: str, reason: str) -> str:
    reason = clean(reason)
    return f"{text}: {reason}" if reason else text


def _during(event: _Fault, what: str, with_step: bool) -> str:
    """The machine and the step of the event."""
    return f"{_who(event)} {what}" + (f" during step {event.step}" if with_step else "")


def _given_back(count: int) -> str:
    return f"; its {_samples(count)} {'was' if count == 1 else 'were'} taken back" if count else ""


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"


def _joined(event: ev.GuestJoined) -> str:
    of_host = f", the host's own {event.spread:.5f}" if event.spread is not None else ""
    device = f", {clean(event.device)}" if event.device else ""
    return f"{_who(event)} joined: gradients agree (cosine {event.parity:.5f}{of_host}){device}"


def _lost(event: ev.GuestLost, with_step: bool) -> str:
    reason = clean(event.reason) or "is gone"
    back = _given_back(event.samples_taken_back)
    if event.put_out:
        return f"{_during(event, 'was removed', with_step)}: it {reason}{back}"
    until = "" if back or reason.startswith("came back") else "; it is out of the run until it reconnects"
    return _during(event, reason, with_step) + back + until


def _not_applied(event: ev.StepNotApplied, with_step: bool) -> str:
    what = f"step {event.step} was not applied" if with_step else "the step was not applied"
    again = f" ({event.in_a_row} in a row)" if event.in_a_row > 1 else ""
    whose = f"{clean(event.machine)}'s " if event.machine else ""
    return f"{what}{again}: {whose}{clean(event.reason)}"


def _loop_awaited(event: ev.LoopAwaited) -> str:
    guests = event.guests
    wait = f"{guests} {'guest waits' if guests == 1 else 'guests wait'}" if guests else "guests will wait"
    after = seconds_text(event.seconds)
    return f"{clean(event.what)} has not reached run.steps() after {after}: {wait} until it does"


def _coded(codec: str) -> str:
    known = {INT4: "in 4 bits a value ", THIN: "in about 2 bits a value "}
    return f"{known.get(codec, '')}(codec {clean(codec)})"


def _statistics(event: ev.StatisticsMeasured) -> str:
    names = ", ".join(clean(name, 60) for name in event.names)
    more = ", …" if event.layers > len(event.names) else ""
    layers = f"{clean(event.kind)} ({event.layers} layer{'s' if event.layers != 1 else ''}: {names}{more})"
    sizes = ", ".join(f"{size} on {clean(machine, 24)}" for machine, size in event.micro_batch.items())
    batch, effective = event.global_batch, event.effective_batch
    if effective >= batch:
        return f"{layers} normalises over all {batch} samples of the step, as they are computed at once ({sizes})"
    return (
        f"{layers} normalises over each micro-batch ({sizes}; {effective:.0f} samples on average), not over the "
        f"step's {batch}; few samples train worse: micro_batch= sets them, GroupNorm does not depend on them"
    )
