"""Runs each strategy on a box and reads its log: alone, torch's DDP, the peers, and Potluck."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from potluck import checked
from potluck.balance.shares import equal_shares, whole_shares
from potluck.errors import PotluckError
from potluck.lab import peer_strategies
from potluck.lab.box import Box
from potluck.lab.meter import StageMeter
from potluck.lab.stage import Actor, Progress, Report, Stage
from potluck.lab.striker import Striker
from potluck.lab.worker_spec import START_S, RankSpec, WorkerSpec, WorkerStep
from potluck.lab.workload import device_name, recipe_flags, recipe_settings
from potluck.plan import about
from potluck.spec.events import RunEvent, RunStarted, StepEnded, from_json
from potluck.spec.faults import PlannedFault
from potluck.spec.fleet import DDP, DDP_BALANCED, POTLUCK, SOLO
from potluck.spec.manifest import RecipeEntry
from potluck.spec.outcome import Outcome, StepDone
from potluck.spec.rig import Machine, Rig

STRATEGIES = (SOLO, DDP, DDP_BALANCED, POTLUCK)

ALONE_S = 4.0
"""A guest's own speed is measured over steps of about this long, or as long as the host's."""
ALONE_STEPS = 4
MASTER_PORT = 29_501
LEAST_STEPS = 3
"""Steps of such a measurement: one to warm up and two to measure."""
WORKER_MICRO_BATCH = 4
"""The micro-batch that potluck's own search finds for paced machines, whose time per sample is the same at every
size."""
BALANCED_BUCKET_MB = 1
"""Bucket size of a careful user: stock buckets of 25 MB hold such a small model whole, so nothing would overlap."""
QUIET = ("--threads", "1", "--view", "quiet", "--checkpoint-every", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Where a strategy runs, and how its progress is reported."""

    rig: Rig
    box: Box
    folder: Path
    report: Report
    most_s: float = math.inf
    """A strategy that would take longer makes fewer steps."""
    faults: tuple[PlannedFault, ...] = ()
    """Faults to inject; only for potluck, whose guests reach the host with a token."""


# -- alone ----------------------------------------------------------------------------------------------


def solo(arena: Arena) -> Outcome:
    """The host alone, all the steps."""
    rig = arena.rig
    settings = recipe_settings(rig.workload)
    with Stage(arena.box, arena.folder / SOLO) as stage:
        actor = stage.start(rig.host.name, _train(rig, rig.host, settings, stage.folder, steady=False))
        events = stage.wait_for_file("*/events.jsonl", START_S)
        clock_s, steps = 0.0, []
        for event in _events(stage, events, actor, _silence_s(rig)):
            if isinstance(event, RunStarted):
                clock_s = event.clock_s
            if isinstance(event, StepEnded):
                steps.append(_step_done(event, clock_s, [rig.host.name]))
                arena.report(_progress(SOLO, event))
        stage.check()
        started = steps[0].ended_at - steps[0].step_s if steps else 0.0
        return Outcome(strategy=SOLO, started_at=started, steps=steps, intervals=stage.computing())


def alone(arena: Arena, machine: Machine) -> float:
    """Measured samples per second of a machine alone.

    Over short steps; the update's time is then spread over the workload's whole batch, as it would be.
    """
    rig = arena.rig
    seconds = machine.seconds_per_sample or 0.1
    step_s = min(ALONE_S, rig.workload.global_batch * (rig.host.seconds_per_sample or ALONE_S))
    batch = max(1, min(rig.workload.global_batch, round(step_s / seconds)))
    settings = recipe_settings(rig.workload, steps=ALONE_STEPS, batch=batch)
    with Stage(arena.box, arena.folder / f"alone-{machine.name}") as stage:
        actor = stage.start(machine.name, _train(rig, machine, settings, stage.folder, steady=True))
        events = stage.wait_for_file("*/events.jsonl", START_S)
        sample_s: list[float] = []
        update_s: list[float] = []
        for event in _events(stage, events, actor, 60.0 + 20 * seconds * batch):
            if isinstance(event, StepEnded):
                sample_s.append((event.step_s - event.update_s) / batch)
                update_s.append(event.update_s)
                arena.report(_progress(f"{machine.name} alone", event))
        stage.check()
    steady = range(1, len(sample_s))
    if not steady:
        raise PotluckError(f"{machine.name} alone made no step", hint=f"see {arena.folder}", machine=machine.name)
    mean_sample_s = sum(sample_s[i] for i in steady) / len(steady)
    mean_update_s = sum(update_s[i] for i in steady) / len(steady)
    return 1 / (mean_sample_s + mean_update_s / rig.workload.global_batch)


def _train(rig: Rig, machine: Machine, settings: dict[str, int], runs: Path, *, steady: bool) -> list[str]:
    command = ["-m", "potluck", "train", rig.workload.recipe, "--guests", "0", "--runs", str(runs), *QUIET]
    return [*command, *_machine_flags(machine, steady=steady), *recipe_flags(settings)]


def _machine_flags(machine: Machine, *, steady: bool = False) -> list[str]:
    sizes = ["--micro-batch", str(machine.micro_batch)] if machine.micro_batch is not None else []
    return ["--name", machine.name, "--device", device_name(machine, steady=steady), *sizes]


# -- potluck --------------------------------------------------------------------------------------------


def potluck(arena: Arena) -> Outcome:
    """The fleet with `potluck host` and `potluck join`; guests join and leave as the rig says."""
    rig = arena.rig
    names = [m.name for m in rig.machines]
    with Stage(arena.box, arena.folder / POTLUCK) as stage, StageMeter(arena.box, names, rig.host.name) as meter:
        host = stage.start(rig.host.name, _host(arena, stage.folder))
        guests = _GuestStarter(arena, stage, stage.wait_for_file("*/token", START_S))
        guests.before_step(1)
        events = stage.wait_for_file("*/events.jsonl", START_S)
        clock_s, steps = 0.0, []
        with contextlib.closing(Striker(arena.faults, arena.box, guests)) as striker:
            for event in _events(stage, events, host, START_S + _silence_s(rig), striker.tick):
                if isinstance(event, RunStarted):
                    clock_s = event.clock_s
                if isinstance(event, StepEnded):
                    present = [m.name for m in event.machines]
                    here = [name for name in present if rig.machine(name).present_at(event.step)]
                    steps.append(_step_done(event, clock_s, here))
                    arena.report(_progress(POTLUCK, event))
                    guests.before_step(event.step + 1)
                striker.saw(event)
        stage.check()
    started = steps[0].ended_at - steps[0].step_s if steps else 0.0
    return Outcome(
        strategy=POTLUCK,
        started_at=started,
        steps=steps,
        intervals=[*stage.computing(), *meter.intervals],
        host_bytes=meter.host_bytes,
        note=guests.gave_up(),
        faults=striker.done,
        incidents=striker.incidents,
        faults_missed=striker.missed,
    )


def _host(arena: Arena, runs: Path) -> list[str]:
    rig = arena.rig
    first = sum(m.join_at_step == 1 for m in rig.guests)
    command = ["-m", "potluck", "host", rig.workload.recipe, "--runs", str(runs), *QUIET]
    command += ["--bind", arena.box.address(rig.host.name), "--wait-for", str(first)]
    command += ["--codec", rig.workload.codec, *_machine_flags(rig.host)]
    return [*command, *recipe_flags(recipe_settings(rig.workload))]


class _GuestStarter:
    """Starts and ends guests between steps and for faults."""

    def __init__(self, arena: Arena, stage: Stage, token: Path) -> None:
        self._arena, self._stage, self._token = arena, stage, token
        self._actors: dict[str, Actor] = {}

    def before_step(self, step: int) -> None:
        for machine in self._arena.rig.guests:
            if machine.leave_at_step == step:
                self.kill(machine.name)
            if step in (machine.join_at_step, machine.return_at_step):
                self.start(machine.name)

    def actor(self, machine: str) -> Actor | None:
        return self._actors.get(machine)

    def kill(self, machine: str) -> None:
        if machine in self._actors:
            self._stage.end(self._actors.pop(machine), at_once=True)

    def start(self, machine: str) -> None:
        self._actors[machine] = self._join(self._arena.rig.machine(machine))

    def gave_up(self) -> str:
        """A note on guests that failed after a fault, which does not count as a failure of the strategy."""
        ends = [(name, actor.process.poll(), actor.log) for name, actor in self._actors.items()]
        return "; ".join(
            f"{name} gave up after a fault, with status {status} (see {log.name})"
            for name, status, log in ends
            if status is not None and status > 0
        )

    def _join(self, machine: Machine) -> Actor:
        token = self._arena.box.token_file(machine.name, self._token)
        command = ["-m", "potluck", "join", "--token-file", str(token), "--threads", "1", "--view", "plain"]
        command += ["--runs", str(self._stage.folder)]
        return self._stage.start(machine.name, [*command, *_machine_flags(machine)])


# -- one process a machine, all equal -------------------------------------------------------------------


def distributed(arena: Arena, strategy: str) -> Outcome:
    """Strategies whose machines are ranks of one process group: DDP, and the peers."""
    rig = arena.rig
    if not arena.box.peers_connect:
        raise PotluckError(
            f"{strategy} connects machines to each other directly, past the proxies of --loopback",
            hint="use Linux with network namespaces for it",
        )
    staying = [rig.host, *(m for m in rig.guests if m.leave_at_step is None and m.join_at_step == 1)]
    shares = _shares(rig, staying, strategy)
    steps = _affordable_steps(arena, staying, shares)
    notes = [f"made {steps} of {rig.workload.steps} steps (each takes long)"] if steps < rig.workload.steps else []
    if strategy in peer_strategies.NAMES and (word := peer_strategies.note(strategy)):
        notes.append(word)
    if arena.faults:
        notes.append("without the faults, which affect only potluck")
    if len(staying) < len(rig.machines):
        notes.append("without the machines that come and go: it stops when one is lost")
    with Stage(arena.box, arena.folder / strategy) as stage:
        spec, out = _worker_spec(arena, strategy, staying, shares, steps)
        with StageMeter(arena.box, [m.name for m in staying], rig.host.name) as meter:
            for rank, machine in enumerate(staying):
                stage.start(machine.name, _worker(strategy, spec, rank))
            first = stage.actors[0]
            done = []
            here = tuple(m.name for m in staying)
            for line in stage.follow(
                out, lambda: first.process.poll() is not None, START_S + 4 * _step_guess_s(rig, staying, shares)
            ):
                made = checked.decode(line, WorkerStep)
                done.append(_peer_step(made, here))
                arena.report(Progress(strategy=strategy, step=made.step, steps=steps, step_s=made.step_s))
            stage.check()
    started = done[0].ended_at - done[0].step_s if done else 0.0
    return Outcome(
        strategy=strategy,
        started_at=started,
        steps=done,
        intervals=[*stage.computing(), *meter.intervals],
        host_bytes=meter.host_bytes,
        note="; ".join(notes),
    )


def _worker(strategy: str, spec: Path, rank: int) -> list[str]:
    if strategy in peer_strategies.NAMES:
        return peer_strategies.command(strategy, spec, rank)
    return ["-m", "potluck.lab.ddp_worker", "--spec", str(spec), "--rank", str(rank)]


def _shares(rig: Rig, machines: Sequence[Machine], strategy: str) -> list[int]:
    seconds = [m.seconds_per_sample or 1.0 for m in machines]
    if strategy in (DDP, peer_strategies.RAY_SYNC, peer_strategies.RAY_ASYNC):
        return equal_shares(rig.workload.global_batch, len(machines))
    return whole_shares(rig.workload.global_batch, seconds, least=1)


def _step_guess_s(rig: Rig, machines: Sequence[Machine], shares: Sequence[int]) -> float:
    """The slowest machine's computing, then fp32 gradients over the slowest link: only to plan the number of
    steps."""
    compute_s = max(n * (m.seconds_per_sample or 1.0) for m, n in zip(machines, shares))
    rates = [m.slower_mbit for m in machines if m.slower_mbit is not None]
    send_s = about.gradient_bytes(rig.workload) * 8e-6 / min(rates) if rates else 0.0
    return compute_s + send_s


def _affordable_steps(arena: Arena, machines: Sequence[Machine], shares: Sequence[int]) -> int:
    steps = arena.rig.workload.steps
    affordable = arena.most_s / max(1e-6, _step_guess_s(arena.rig, machines, shares))
    return min(steps, max(LEAST_STEPS, math.floor(min(affordable, steps))))


def _peer_step(made: WorkerStep, present: tuple[str, ...]) -> StepDone:
    loss = math.nan if made.loss is None else made.loss
    return StepDone(**{**structs.asdict(made), "loss": loss}, present=present)


def _worker_spec(
    arena: Arena, strategy: str, machines: Sequence[Machine], shares: Sequence[int], steps: int
) -> tuple[Path, Path]:
    folder = arena.folder / strategy
    rig, out, spec = arena.rig, folder / "steps.jsonl", folder / "spec.json"
    members = tuple(
        RankSpec(
            name=machine.name,
            device=device_name(machine),
            micro_batch=machine.micro_batch or WORKER_MICRO_BATCH,
            share=share,
            address=arena.box.address(machine.name),
        )
        for machine, share in zip(machines, shares, strict=True)
    )
    content = WorkerSpec(
        recipe=RecipeEntry(name=rig.workload.recipe, config=dict(recipe_settings(rig.workload))),
        members=members,
        steps=steps,
        seed=rig.workload.seed,
        master_address=arena.box.address(rig.host.name),
        master_port=MASTER_PORT,
        interface="eth0",
        out=out,
        asynchronous=strategy == peer_strategies.RAY_ASYNC,
        bucket_mb=BALANCED_BUCKET_MB if strategy == DDP_BALANCED else None,
    )
    spec.write_text(checked.to_json(content), encoding="utf-8")
    return spec, out


# -- reading logs ---------------------------------------------------------------------------------------


def _events(
    stage: Stage, path: Path, actor: Actor, silence_s: float, between: Callable[[], None] = lambda: None
) -> Iterator[RunEvent]:
    """A run's events until its process has ended."""
    for line in stage.follow(path, lambda: actor.process.poll() is not None, silence_s, between):
        if (event := from_json(line)) is not None:
            yield event


def _step_done(event: StepEnded, clock_s: float, present: Sequence[str]) -> StepDone:
    return StepDone(
        step=event.step,
        ended_at=clock_s + event.t_s,
        step_s=event.step_s,
        loss=math.nan if event.loss is None else event.loss,
        samples=event.samples,
        present=tuple(present),
    )


def _progress(strategy: str, event: StepEnded) -> Progress:
    return Progress(strategy=strategy, step=event.step, steps=event.steps or event.step, step_s=event.step_s)


def _silence_s(rig: Rig) -> float:
    """Several times a step of the host alone: if no step ends within this time, something hangs."""
    return 60.0 + 10 * rig.workload.global_batch * (rig.host.seconds_per_sample or 1.0)
