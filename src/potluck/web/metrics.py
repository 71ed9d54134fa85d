"""The run's figures for programs: `/metrics` in Prometheus' text format, and `/status.json`. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from potluck._version import __version__
from potluck.report.summary import Summary
from potluck.web.state import PageState

STATUS_VERSION = 1


class MachineStatus(Struct, frozen=True, kw_only=True):
    """A machine in `machines`: those that are present, then the last 16 that left. Null: not known."""

    name: str
    """Its name."""
    role: str
    """host or guest."""
    device: str
    """What it computes on."""
    state: str
    """What it is doing: starting, joining, computing, late, sitting out, gone, done and the like."""
    reason: str
    """Why it is in this state, or what it does now; may be empty."""
    up: bool
    last_step_samples: int
    """Its samples in the last step."""
    last_step_share: float
    samples_per_s: float | None
    busy: float | None
    link_bytes_per_s: float | None
    heard_s: float | None
    samples: int
    taken_back_samples: int
    dropped_samples: int
    times_lost: int


class Status(Struct, frozen=True, kw_only=True):
    """The run. Null: not known, or not yet. Programs read these names: a change of meaning is a new `version`."""

    version: int
    """Version of this object: 1."""
    potluck: str
    """Version of Potluck on the host."""
    run_id: str
    """Name of the run folder."""
    recipe: str
    """The recipe, or the script's name."""
    state: str
    """not begun, first step, training, resuming, finished, interrupted, failed or host gone."""
    step: int
    steps: int | None
    loss: float | None
    samples: int
    samples_per_s: float | None
    mean_samples_per_s: float | None
    step_s: float | None
    predicted_step_s: float | None
    planned_step_s: float | None
    speedup: float | None
    speedup_margin: float | None
    efficiency: float | None
    recovery: float | None
    eta_s: float | None
    seconds: float
    wait_s: float
    update_s: float
    bytes_received: int
    bytes_sent: int
    dropped_samples: int
    not_applied: int
    machines: tuple[MachineStatus, ...]
    """The host first."""


def status_of(state: PageState) -> Status:
    summary, step = state.summary(), state.run.step
    if (delivered := state.delivered) is not None:  # a guest knows its own part only
        summary = structs.replace(
            summary, steps=delivered.step, last_loss=delivered.loss, samples=delivered.total_samples
        )
    return Status(
        version=STATUS_VERSION,
        potluck=__version__,
        run_id=summary.run_id or state.guest_of,
        recipe=summary.recipe,
        state=state.status()[0],
        step=summary.steps,
        steps=summary.planned_steps,
        loss=summary.last_loss,
        samples=summary.samples,
        samples_per_s=step.samples_per_s if step is not None else None,
        mean_samples_per_s=summary.samples_per_s,
        step_s=summary.step_s,
        predicted_step_s=summary.predicted_s,
        planned_step_s=summary.planned_s,
        speedup=summary.speedup,
        speedup_margin=summary.speedup_margin,
        efficiency=summary.efficiency,
        recovery=summary.recovery,
        eta_s=step.eta_s if step is not None and not state.ended else None,
        seconds=summary.seconds,
        wait_s=summary.wait_s,
        update_s=summary.update_s,
        bytes_received=summary.bytes_up,
        bytes_sent=summary.bytes_down,
        dropped_samples=summary.dropped_samples,
        not_applied=summary.not_applied,
        machines=_machines(state, summary),
    )


def _machines(state: PageState, summary: Summary) -> tuple[MachineStatus, ...]:
    totals = {machine.name: machine for machine in summary.machines}
    own = summary.samples if state.delivered is not None else 0
    rows = state.rows()
    samples = sum(row.samples for row in rows)
    found = []
    for row in rows:
        total = totals.get(row.name)
        found.append(
            MachineStatus(
                name=row.name,
                role=row.role,
                device=row.device,
                state=row.state,
                reason=row.reason,
                up=row.state != "gone",
                last_step_samples=row.samples,
                last_step_share=row.samples / samples if samples else 0.0,
                samples_per_s=row.rate,
                busy=row.busy,
                link_bytes_per_s=state.links.get(row.name),
                heard_s=state.heard(row),
                samples=total.samples if total is not None else own if row.role == "guest" else 0,
                taken_back_samples=total.taken_back_samples if total is not None else 0,
                dropped_samples=total.dropped_samples if total is not None else 0,
                times_lost=total.times_lost if total is not None else 0,
            )
        )
    return tuple(found)


# Name, type, field of the status, meaning. Names are promised (docs/reference/metrics.md): they end in their unit.
RUN_SERIES = (
    ("step", "gauge", "step", "Steps finished."),
    ("steps_planned", "gauge", "steps", "Steps in total."),
    ("loss", "gauge", "loss", "Loss of the last step."),
    ("samples_total", "counter", "samples", "Samples of all steps."),
    ("samples_per_second", "gauge", "samples_per_s", "Samples per second over the last 8 steps."),
    ("mean_samples_per_second", "gauge", "mean_samples_per_s", "Samples per second over the whole run."),
    ("step_seconds", "gauge", "step_s", "Seconds of a step, the median."),
    ("predicted_step_seconds", "gauge", "predicted_step_s", "Seconds of a step, predicted from measured speeds."),
    ("planned_step_seconds", "gauge", "planned_step_s", "Seconds of a step, as planned before the run."),
    ("speedup_ratio", "gauge", "speedup", "Speed-up over the host alone."),
    ("speedup_margin_ratio", "gauge", "speedup_margin", "Half of the speed-up's 95 % interval."),
    (
        "efficiency_ratio",
        "gauge",
        "efficiency",
        "Samples per second divided by the sum of what each machine reaches alone.",
    ),
    ("recovery_ratio", "gauge", "recovery", "Share of the guests' possible gain that was reached."),
    ("eta_seconds", "gauge", "eta_s", "Seconds left to the last step."),
    ("steps_seconds_total", "counter", "seconds", "Seconds of all steps."),
    ("wait_seconds_total", "counter", "wait_s", "Seconds that the host waited for leases."),
    ("update_seconds_total", "counter", "update_s", "Seconds of updates."),
    ("received_bytes_total", "counter", "bytes_received", "Payload received from guests."),
    ("sent_bytes_total", "counter", "bytes_sent", "Payload sent to guests."),
    ("dropped_samples_total", "counter", "dropped_samples", "Samples in dropped contributions."),
    ("steps_not_applied_total", "counter", "not_applied", "Steps whose update was not applied."),
)
MACHINE_SERIES = (
    ("up", "gauge", "up", "Whether the machine is connected."),
    ("share_ratio", "gauge", "last_step_share", "The machine's share of the last step's samples."),
    ("samples_total", "counter", "samples", "The machine's samples in all steps."),
    ("samples_per_second", "gauge", "samples_per_s", "The machine's samples per second while it computes."),
    ("busy_ratio", "gauge", "busy", "Share of the last step in which the machine computed."),
    ("link_bytes_per_second", "gauge", "link_bytes_per_s", "Measured rate of the machine's link."),
    ("heard_seconds", "gauge", "heard_s", "Seconds since the host last heard from the machine."),
    ("taken_back_samples_total", "counter", "taken_back_samples", "Leased samples that the host took back."),
    (
        "dropped_samples_total",
        "counter",
        "dropped_samples",
        "The machine's samples in contributions that were dropped.",
    ),
    ("lost_total", "counter", "times_lost", "Times that the guest was lost."),
)


def metrics_text(status: Status) -> str:
    """Prometheus' text format 0.0.4. A figure that is not known has no line."""
    return "\n".join(_lines(status)) + "\n"


def _lines(status: Status) -> Iterator[str]:
    yield from ("# HELP potluck_info The run.", "# TYPE potluck_info gauge")
    yield f"potluck_info{_labels(run=status.run_id, recipe=status.recipe, version=status.potluck)} 1"
    yield from ("# HELP potluck_state What the run is doing.", "# TYPE potluck_state gauge")
    yield f"potluck_state{_labels(state=status.state)} 1"
    for name, kind, field, about in RUN_SERIES:
        if (value := getattr(status, field)) is not None:
            yield from _head(f"potluck_{name}", kind, about)
            yield f"potluck_{name} {float(value)!r}"
    for name, kind, field, about in MACHINE_SERIES:
        known = [(m, value) for m in status.machines if (value := getattr(m, field)) is not None]
        if known:
            yield from _head(f"potluck_machine_{name}", kind, about)
        for machine, value in known:
            labels = _labels(machine=machine.name, role=machine.role)
            yield f"potluck_machine_{name}{labels} {float(value)!r}"


def _head(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


def _labels(**labels: str) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}"
