"""Runs the strategies on a rig, one after the other, and turns their outcomes into figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from potluck.checked import nearest
from potluck.errors import ConfigError, PotluckError, UserError
from potluck.lab import peer_strategies
from potluck.lab.box import Box
from potluck.lab.figures import mean_step_s, results
from potluck.lab.stage import Report
from potluck.lab.strategies import STRATEGIES, Arena, distributed, potluck, solo
from potluck.lab.strategies import alone as measure_alone
from potluck.plan.rigs import step_times
from potluck.spec.faults import FaultPlan
from potluck.spec.fleet import POTLUCK, SOLO
from potluck.spec.outcome import Outcome
from potluck.spec.results import Results
from potluck.spec.rig import Rig

WARM_UP_STEPS = 4
"""Steps that do not count: guests are not measured yet when the first begins."""
PATIENCE = 2
"""Limit of a strategy's time, as a multiple of the host's alone; above it, fewer steps are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutcome:
    """The result of a bench."""

    results: Results
    outcomes: tuple[Outcome, ...]
    failed: dict[str, str]
    """Strategies that failed, and why."""


def warm_up_of(steps: int) -> int:
    return min(WARM_UP_STEPS, steps // 3)


def check_strategies(names: Sequence[str]) -> list[str]:
    """The strategies in the order in which they are run, the host alone first; if none is named, all except the
    peers."""
    known = [*STRATEGIES, *peer_strategies.NAMES]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no strategy {name!r}", hint=nearest(name, known))
        reason = peer_strategies.available()[name] if name in peer_strategies.NAMES else None
        if reason is not None:
            raise ConfigError(
                f"{name} cannot run here: {reason}", hint='install the extra: pip install -e ".[peers]"'
            )
    chosen = set(names) or set(STRATEGIES)
    return [name for name in known if name in chosen | {SOLO}]


def loopback_strategies(names: Sequence[str]) -> list[str]:
    """The strategies that can run through a proxy. In the others, machines connect to each other directly."""
    able = [SOLO, POTLUCK]
    if unable := [name for name in names if name in check_strategies(names) and name not in able]:
        raise UserError(
            f"{', '.join(unable)} cannot run with --loopback: its machines connect to each other, past the proxy",
            hint="leave --loopback out (Linux with network namespaces), or choose --strategy potluck",
        )
    return check_strategies(names or able)


def without_faults(names: Sequence[str]) -> list[str]:
    """Those of these strategies that planned faults do not affect."""
    chosen = check_strategies(names)
    if POTLUCK not in chosen:
        raise UserError(
            "--faults affects only potluck, which is not among the strategies", hint="add --strategy potluck"
        )
    return [name for name in chosen if name not in (POTLUCK, SOLO)]


def new_folder(folder: Path) -> None:
    """Make the folder of a bench, or find it empty: logs of two must not mix."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty", hint="give --out a new folder, so that logs do not mix")
    except OSError as error:
        what = f"cannot write {error.filename or folder}: {error.strerror or error}"
        raise UserError(what, hint="give --out a path that you can write to") from error


def put_up(rig: Rig, *, loopback: bool, detours: bool) -> AbstractContextManager[Box]:
    """The rig: with network namespaces, or on 127.0.0.1 behind a proxy. `detours`: its links can have faults."""
    if loopback:
        from potluck.lab.loopback import LoopbackBox

        return LoopbackBox(rig)
    from potluck.lab.namespaces import NamespaceBox

    return NamespaceBox(rig, detours=detours)


def bench(
    rig: Rig,
    strategies: Sequence[str],
    box: Box,
    folder: Path,
    report: Report,
    faults: FaultPlan | None = None,
) -> BenchOutcome:
    """Run the strategies on a running box; faults affect only potluck."""
    planned = faults.on(rig).faults if faults is not None else ()
    arena = Arena(rig=rig, box=box, folder=folder, report=report)
    outcomes = [solo(arena)]
    warm_up = warm_up_of(rig.workload.steps)
    host_step_s = mean_step_s(outcomes[0], warm_up)
    if host_step_s is None:
        raise PotluckError("the host alone made no step", hint=f"see {folder}", machine=rig.host.name)
    alone = {rig.host.name: rig.workload.global_batch / host_step_s}
    with ThreadPoolExecutor(max_workers=max(1, len(rig.guests))) as pool:
        # Paced machines sleep most of the time, so that they can be measured at once.
        alone |= zip((m.name for m in rig.guests), pool.map(lambda m: measure_alone(arena, m), rig.guests))
    arena = Arena(
        rig=rig,
        box=box,
        folder=folder,
        report=report,
        most_s=PATIENCE * host_step_s * rig.workload.steps,
        faults=planned,
    )
    failed: dict[str, str] = {}
    for name in strategies:
        if name == SOLO:
            continue
        try:
            outcomes.append(potluck(arena) if name == POTLUCK else distributed(arena, name))
        except PotluckError as error:
            failed[name] = str(error)
            outcomes.append(Outcome(strategy=name, started_at=0.0, steps=[], note=f"failed: {error}"))
    return BenchOutcome(
        results=results(
            rig, outcomes, alone, host_step_s, warm_up, box.kind, _predicted(rig, outcomes, warm_up, alone)
        ),
        outcomes=tuple(outcomes),
        failed=failed,
    )


def _predicted(rig: Rig, outcomes: Sequence[Outcome], warm_up: int, alone: Mapping[str, float]) -> dict[str, float]:
    """The plan's prediction for each strategy, from the rig, with measured speeds only if the rig has none."""
    found: dict[str, float] = {}
    for outcome in outcomes:
        try:
            found |= step_times(rig, [outcome.strategy], warm_up, alone)
        except ConfigError:
            continue  # a fleet that the strategy cannot be planned for: its row says what happened
    return found
