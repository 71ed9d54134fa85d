"""Events as sentences: what happened to which machine, in one line. It does not know where they are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from potluck.report.text import clean, integer, number
from potluck.units import factor_text, rate_text, seconds_text

Event = Mapping[str, Any]
ENOUGH_FOR_STATISTICS = 32
"""From so many samples on, batch statistics cost a CNN nothing that could be measured: see docs/log.md."""
Level = Literal["good", "info", "warn", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventText:
    """One notable thing that happened."""

    text: str
    level: Level
    about: tuple[str, str, str]
    """Event, subject, kind of reason: where space is short a newer message replaces one about the same."""


def describe(event: Event) -> EventText | None:
    """The sentence for an event, or None for those that are no news (steps, start and end have their own)."""
    kind = str(event.get("event", ""))
    entry = _SENTENCES.get(kind)
    if entry is None or (kind == "flight_recorded" and not event.get("first")):
        return None
    level, sentence = entry
    if kind == "guest_left" and event.get("failed"):
        level = "bad"
    if kind == "batch_statistics" and (number(event, "effective_batch") or 0) >= min(
        ENOUGH_FOR_STATISTICS, integer(event, "global_batch")
    ):
        level = "info"
    subject = clean(event.get("machine") or event.get("address"))
    return EventText(text=sentence(event), level=level, about=(kind, subject, _kind_of_reason(kind, event)))


def _kind_of_reason(kind: str, event: Event) -> str:
    """The reason without its figures: silent for 5.1 s and for 5.3 s is the same, a lost connection is not."""
    # Strangers may knock without end, and their reason counts them.
    return "" if kind == "refused_stranger" else re.sub(r"\d+(\.\d+)?", "#", clean(event.get("reason")))


def steps_text(event: Event) -> str:
    """'12/300', or '12' in a run without an end."""
    steps = event.get("steps")
    step = integer(event, "step")
    return f"{step:>{len(str(steps))}}/{steps}" if steps else str(step)


def loss_text(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.3e}"


def eta_text(seconds: float) -> str:
    """Whole seconds: a tenth that changes at every glance says nothing."""
    return seconds_text(seconds) if seconds >= 59.5 else f"{seconds:.0f} s"


def end_text(event: Event) -> str:
    """The last line of a run."""
    reason = clean(event.get("reason")) or "ended"
    parts = [f"{reason} after step {integer(event, 'step')}, {seconds_text(number(event, 'seconds'))}"]
    if "loss" in event:
        parts.append(f"loss {loss_text(number(event, 'loss'))}")
    if count := integer(event, "not_applied"):
        parts.append(f"{not_applied_text(count)} not applied")
    if number(event, "samples_per_s") is not None:
        parts.append(rate_text(number(event, "samples_per_s"), "samples"))
    if number(event, "speedup") is not None:
        parts.append(f"{factor_text(number(event, 'speedup'))} this machine alone")
    return ", ".join(parts)


def _name(event: Event) -> str:
    return clean(event.get("machine")) or "a guest"


def _who(event: Event) -> str:
    """With its address, where it matters which of two laptops this is."""
    address = clean(event.get("address"))
    return f"{_name(event)} ({address})" if address else _name(event)


def _because(event: Event) -> str:
    reason = clean(event.get("reason"))
    return f": {reason}" if reason else ""


def _joined(event: Event) -> str:
    parity = number(event, "parity")
    spread = number(event, "spread")
    of_host = f", the host's own {spread:.5f}" if spread is not None else ""
    facts = [f"gradients agree (cosine {parity:.5f}{of_host})"] if parity is not None else []
    if event.get("device"):
        facts.append(clean(event.get("device")))
    return f"{_who(event)} joined" + (f": {', '.join(facts)}" if facts else "")


def _failed(event: Event, what: str, and_then: str = "", otherwise: str = "") -> str:
    """Who did what in which step, and what became of its samples: one sentence for every fault."""
    step = integer(event, "step")
    during = f" during step {step}" if step else ""
    samples = _given_back(event) or (f"; {otherwise}" if otherwise else "")
    return f"{_who(event)} {what}{during}{and_then}{samples}"


def _given_back(event: Event) -> str:
    count = integer(event, "samples_taken_back") or integer(event, "samples")
    return f"; its {_samples(count)} {'was' if count == 1 else 'were'} taken back" if count else ""


def _lost(event: Event) -> str:
    reason = clean(event.get("reason")) or "is gone"
    if event.get("put_out"):
        return _failed(event, "was put out", f": it {reason}")
    back = reason.startswith("came back")
    return _failed(event, reason, otherwise="" if back else "it is out until it comes back")


def _mismatch(event: Event) -> str:
    reason = clean(event.get("reason")) or "held weights that are not the host's"
    return _failed(event, reason) + "; the weights are sent to it anew"


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"


def _hello(event: Event) -> str:
    device = clean(event.get("device"))
    return f"{_who(event)} is joining" + (f": {device}" if device else "")


def _taken_back(event: Event) -> str:
    return _failed(event, clean(event.get("reason")) or "was late")


def _dropped(event: Event) -> str:
    return f"dropped {_samples(integer(event, 'samples'))} of {_name(event)}{_because(event)}"


def _damaged(event: Event) -> str:
    words = f"{clean(event.get('path'))} is damaged{_because(event)}"
    return words + (f"; going on after step {integer(event, 'resumed_from')}" if event.get("resumed_from") else "")


def not_applied_text(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"


def _not_applied(event: Event) -> str:
    step, machine = integer(event, "step"), clean(event.get("machine"))
    what = f"step {step} was not applied" if step else "the step was not applied"
    times = integer(event, "in_a_row")
    again = f" ({times} in a row)" if times > 1 else ""
    reason = clean(event.get("reason"))
    whose = f"{machine}'s " if machine else ""
    return f"{what}{again}: {whose}{reason}"


def _checkpoint(event: Event) -> str:
    return f"saved {clean(event.get('path'))} in {seconds_text(number(event, 'seconds'))}"


def _loop_awaited(event: Event) -> str:
    guests, after = integer(event, "guests"), seconds_text(number(event, "seconds"))
    wait = f"{guests} {'guest waits' if guests == 1 else 'guests wait'}" if guests else "guests will wait"
    return f"{clean(event.get('what'))} has not reached run.steps() after {after}: {wait} until it does"


def _not_saved(event: Event) -> str:
    again = "; tries again at the next interval" if event.get("again") else ""
    return f"step {integer(event, 'step')} is not saved{_because(event)}{again}"


def _log_failed(event: Event) -> str:
    return f"cannot write to {clean(event.get('path'))}{_because(event)}; the run goes on, its log has a gap"


def _batch_statistics(event: Event) -> str:
    count, batch = integer(event, "layers"), integer(event, "global_batch")
    names = ", ".join(clean(n, 60) for n in event.get("names") or ())
    more = ", …" if count > len(event.get("names") or ()) else ""
    layers = f"{clean(event.get('kind'))} ({count} layer{'s' if count != 1 else ''}: {names}{more})"
    at_once = event.get("micro_batch")
    machines = at_once if isinstance(at_once, Mapping) else {}
    sizes = ", ".join(f"{integer(machines, m)} on {clean(m, 24)}" for m in machines)
    effective = number(event, "effective_batch") or 0.0
    if effective >= batch:
        return f"{layers} normalises over all {batch} samples of the step, as they are computed at once ({sizes})"
    return (
        f"{layers} normalises over each micro-batch ({sizes}; {effective:.0f} samples on average), not over the "
        f"step's {batch}; few samples train worse: micro_batch= sets them, GroupNorm does not depend on them"
    )


_SENTENCES: Mapping[str, tuple[Level, Callable[[Event], str]]] = {
    "guest_hello": ("info", _hello),
    "guest_joined": ("good", _joined),
    "guest_left": ("info", lambda e: f"{_who(e)} left{_because(e)}{_given_back(e)}"),
    "guest_lost": ("bad", _lost),
    "guest_refused": ("bad", lambda e: f"refused {_who(e)}{_because(e)}"),
    "guest_sits_out": ("warn", lambda e: f"{_name(e)} sits out{_because(e)}"),
    "lease_taken_back": ("warn", _taken_back),
    "contribution_dropped": ("warn", _dropped),
    "replica_mismatch": ("bad", _mismatch),
    "refused_stranger": (
        "bad",
        lambda e: f"turned away a stranger at {clean(e.get('address')) or 'an unknown address'}{_because(e)}",
    ),
    "step_not_applied": ("bad", _not_applied),
    "checkpoint": ("info", _checkpoint),
    "checkpoint_failed": ("bad", _not_saved),
    "checkpoint_damaged": ("bad", _damaged),
    "flight_recorded": ("info", lambda e: f"for a bug report, the last messages: {clean(e.get('path'))}"),
    "loop_awaited": ("warn", _loop_awaited),
    "log_failed": ("bad", _log_failed),
    "log_gap": ("warn", lambda e: f"the log lacks {integer(e, 'lines')} lines here: they could not be written"),
    "batch_statistics": ("warn", _batch_statistics),
    "note": ("info", lambda e: clean(e.get("text"))),
}
