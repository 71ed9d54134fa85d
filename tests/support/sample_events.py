"""Events and manifest of an imagined run, for tests of the views, the summary and the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from potluck.spec import events as ev
from potluck.spec.config import RunConfig
from potluck.spec.events import RunEvent
from potluck.spec.manifest import MachineEntry, Manifest

LAPTOP: Any = {"machine": "laptop", "address": "10.0.0.7"}


def run_start(**changes: Any) -> ev.RunStarted:
    start = ev.RunStarted(
        run_id="1115-gpt",
        folder="runs/1115-gpt",
        clock_s=100.0,
        recipe="gpt",
        machine="tower",
        device="cuda",
        steps=4,
        global_batch=32,
        parameters=10_900_000,
        trained_parameters=10_900_000,
        codec="int4",
        micro_batch=8,
        tokens_per_sample=256,
        resumed_from=None,
        join=True,
    )
    return msgspec.structs.replace(start, **changes)


def machine(name: str, samples: int, **changes: Any) -> ev.MachineFigures:
    row = ev.MachineFigures(
        name=name,
        role="guest",
        device="cpu",
        samples=samples,
        micro_batch=None,
        micro_batches=0,
        rate=8.0,
        busy=0.9,
        state="computing",
        reason="",
    )
    return msgspec.structs.replace(row, **changes)


def host(samples: int = 24, **changes: Any) -> ev.MachineFigures:
    row = machine("tower", samples, role="host", device="cuda", rate=24.0, busy=0.99)
    return msgspec.structs.replace(row, **changes)


def step(number: int, **changes: Any) -> ev.StepEnded:
    machines = tuple(changes.pop("machines", (host(), machine("laptop", 8))))
    made = ev.StepEnded(
        step=number,
        steps=4,
        loss=5.0 - number,
        applied=True,
        step_s=1.0,
        between_s=0.0,
        samples={m.name: m.samples for m in machines},
        samples_per_s=32.0,
        tokens_per_s=8192.0,
        mfu=None,
        speedup=1.25,
        predicted_s=None,
        eta_s=4.0 - number,
        wait_s=0.01,
        update_s=0.04,
        bytes_up=1000,
        bytes_down=2000,
        dropped=0,
        taken_back=0,
        machines=machines,
    )
    return msgspec.structs.replace(made, **changes)


def run_end(**changes: Any) -> ev.RunEnded:
    end = ev.RunEnded(
        step=4,
        loss=1.0,
        not_applied=0,
        seconds=4.2,
        samples_per_s=31.5,
        speedup=1.25,
        reason="finished",
        folder="runs/1115-gpt",
    )
    return msgspec.structs.replace(end, **changes)


def joined(name: str = "laptop", **changes: Any) -> ev.GuestJoined:
    event = ev.GuestJoined(machine=name, address="10.0.0.7", device="cpu", parity=0.99998, rate=8.0)
    return msgspec.structs.replace(event, **changes)


def sits_out(**changes: Any) -> ev.GuestSitsOut:
    return msgspec.structs.replace(ev.GuestSitsOut(machine="laptop", step=2, reason="too slow"), **changes)


def taken_back(**changes: Any) -> ev.LeaseTakenBack:
    event = ev.LeaseTakenBack(**LAPTOP, step=2, samples=8, reason="was late", silent=False)
    return msgspec.structs.replace(event, **changes)


def not_applied(**changes: Any) -> ev.StepNotApplied:
    event = ev.StepNotApplied(machine="tower", step=2, reason="own gradient is NaN", in_a_row=2, so_far=2)
    return msgspec.structs.replace(event, **changes)


def news() -> list[RunEvent]:
    """One of each kind that is shown as a sentence."""
    return [
        ev.GuestHello(**LAPTOP, device="cpu"),
        joined(),
        ev.GuestLeft(**LAPTOP, reason="its user stopped it", step=2, samples_taken_back=0),
        ev.GuestLost(**LAPTOP, reason="silent for 5 s", step=2, samples_taken_back=8),
        ev.GuestRefused(**LAPTOP, reason="another model"),
        sits_out(),
        ev.GuestCodec(machine="laptop", step=2, codec="thin", reason="its link"),
        taken_back(),
        ev.ReplicaMismatch(**LAPTOP, step=2, samples=8, pieces=1, reason="held other weights"),
        ev.ContributionDropped(machine="laptop", step=2, samples=1, reason="not finite"),
        not_applied(),
        ev.StrangerRefused(address="10.0.0.66", reason="a wrong key"),
        ev.CheckpointSaved(step=2, path="checkpoints/step-2", seconds=0.3),
        ev.CheckpointFailed(step=2, reason="No space left on device", again=True),
        ev.CheckpointDamaged(path="checkpoints/step-2", reason="its hash differs", resumed_from=1),
        ev.LoopAwaited(what="job.py", seconds=61.0, guests=1),
        ev.LogFailed(path="runs/x/events.jsonl", reason="No space left on device"),
        ev.LogGap(lines=3),
        ev.FlightRecorded(machine="tower", path="runs/x/flight-tower-1.jsonl", first=True),
        statistics(),
        ev.Logged(step=3, values={"accuracy": 0.93, "broken": None}),
        ev.RunNote(text="a word to the reader"),
    ]


def statistics(**changes: Any) -> ev.StatisticsMeasured:
    event = ev.StatisticsMeasured(
        step=2,
        kind="BatchNorm2d",
        layers=5,
        names=("a", "b", "c"),
        global_batch=32,
        micro_batch={"tower": 8},
        effective_batch=8.0,
    )
    return msgspec.structs.replace(event, **changes)


def quiet() -> list[RunEvent]:
    """One of each kind that no view of the host shows."""
    return [
        ev.ReplicaChecked(**LAPTOP, step=2),
        ev.Delivered(step=2, samples=8, loss=1.0, compute_s=0.5, total_samples=16),
        ev.HostPreparing(reason="job.py has not reached its training loop yet"),
        ev.HostGone(seconds=3.0),
        ev.HostBack(),
        ev.GuestEnded(samples=16, compute_s=1.0),
    ]


def whole_run() -> list[RunEvent]:
    return [run_start(), *(step(n) for n in range(1, 5)), run_end()]


def manifest(**changes: Any) -> Manifest:
    """What a run of a script says before it starts."""
    host = MachineEntry(name="tower", role="host", device="cuda")
    usual = Manifest(
        what="job.py", command="host", config=RunConfig(), versions={"potluck": "1"}, machines=(host,), port=1234
    )
    return msgspec.structs.replace(usual, **changes)


def write(folder: Path, events: list[RunEvent], tail: str = "") -> Path:
    """A run folder with this log."""
    folder.mkdir(parents=True, exist_ok=True)
    text = b"".join(ev.to_json(e) + b"\n" for e in events)
    (folder / "events.jsonl").write_bytes(text + tail.encode())
    return folder
