"""A script as a trainable of Ray Tune, and the callback by which idle nodes of the Ray cluster help its trials.

Tune schedules, searches, restarts and stores checkpoints. A trial is `potluck host SCRIPT` on the node that Tune
has chosen; no tensor of its training goes through Ray.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from potluck import checked
from potluck.errors import MissingModuleError, ScriptError
from potluck.fleet import sealed
from potluck.fleet.ray import RayFleet, RayNode, nodes_of
from potluck.fleet.script import read_script
from potluck.sweep.helpers import Helpers
from potluck.sweep.sharing import helping
from potluck.sweep.spec import MACHINE, MOST_STARTS, SweepWork, Trial, TrialNews, TrialResult
from potluck.sweep.trial import TrialProcess, kept_files

if TYPE_CHECKING:
    from ray.tune import Callback

    from potluck.sweep.trial_runs import SweepSettings

Tell = Callable[[str], None]

REPORT_S = 2.0
NODE, NEWS = "potluck_node", "potluck_news"
"""Keys in a trial's results: its node, and its `TrialNews` as JSON, whose token is encrypted."""

watches: dict[bytes, Callable[[], TrialWatch]] = {}
"""In the driver: the receiver of a callback's messages, by public key, because Tune pickles callbacks and writes
them to disk."""
_pairs: dict[bytes, sealed.KeyPair] = {}
"""In the driver: the key pair of each trainable, by its public key."""


def need_tune() -> None:
    """Raises MissingModuleError where Ray Tune is not installed."""
    try:
        import ray.tune  # noqa: F401
    except ImportError as error:
        raise MissingModuleError(
            f"Ray Tune needs {error.name}, which is not installed", hint="pip install -e '.[sweep]'"
        ) from None
    sealed.need_library("sweep")


def trainable(
    script: str | os.PathLike[str],
    *,
    arguments: Sequence[str] = (),
    send: Sequence[str | os.PathLike[str]] = (),
    json_option: str | None = None,
    checkpoint_every: int = 50,
) -> functools.partial[None]:
    """A trainable for `ray.tune.Tuner` that runs a script with each trial's parameters.

    Args:
        script: a training script with Potluck's loop, as for `potluck host`.
        arguments: arguments that all trials get.
        send: files that go with the script, such as modules that it imports.
        json_option: give the parameters as one JSON object, as the value of this option. Without it each
            parameter is an option of its own, `--lr=0.0003`.
        checkpoint_every: hand a checkpoint over to Tune every N steps. A trial that is restarted resumes there.

    The trial's metrics are `loss` and what the script gives to `run.log(name=value)`.
    """
    need_tune()
    keys = sealed.KeyPair()
    _pairs[keys.public] = keys
    found = read_script(Path(script), [Path(file) for file in send], arguments)
    work = SweepWork(
        names=found.names,
        contents=found.contents,
        arguments=tuple(arguments),
        json_option=json_option,
        checkpoint_every=checkpoint_every,
        storage="",
        public=keys.public,
    )
    return functools.partial(host_trial, work, raises=True)


def host_trial(work: SweepWork, config: dict[str, Any], *, raises: bool) -> None:
    """Runs in a Tune actor, on the node that hosts the trial. `raises`: False for `potluck sweep`."""
    import ray
    from ray import tune

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray hides GPUs from whoever has not asked for one
    node = ray.get_runtime_context().get_node_id()
    id = tune.get_context().get_trial_id() or "trial"
    trial = Trial(id=id, parameters=config) if raises else Trial.of(id, config)
    given = tune.get_checkpoint()
    with tempfile.TemporaryDirectory(prefix="potluck-handed-") as folder:
        start_from = Path(given.to_directory(f"{folder}/given")) if given is not None else None
        name, here = next((n, d) for n, d in RayFleet().nodes().items() if d.id == node)
        process = TrialProcess(work, trial, name=name, start_from=start_from, bind=here.address)
        told, before = time.monotonic() - REPORT_S, TrialNews()
        try:
            while (news := process.news()).status is None:
                process.prepare_next()
                handed = process.checkpoint_to(Path(folder) / "handed")
                new = news.step > before.step or bool(news.token) > bool(before.token)
                if handed is not None or (new and time.monotonic() - told > REPORT_S):
                    _report(process.news(), node, handed)
                    told, before = time.monotonic(), news
                time.sleep(0.2)
            handed = process.checkpoint_to(Path(folder) / "handed")
            if work.storage:
                process.keep_files(Path(work.storage) / id)
            if news.why and raises:
                raise ScriptError(f"{work.names[0]} failed: {news.why}")
            _report(process.news(), node, handed)
        finally:
            process.close()


def _report(news: TrialNews, node: str, handed: Path | None) -> None:
    from ray import tune

    metrics = {name: math.nan if value is None else value for name, value in news.metrics.items()}
    results = {**metrics, "step": news.step, NODE: node, NEWS: msgspec.json.encode(news).decode()}
    tune.report(results, checkpoint=tune.Checkpoint.from_directory(str(handed)) if handed else None)


def _fleet() -> RayFleet:
    """Guests that take none of Ray's resources: Tune may place a trial on their node at any time."""
    return RayFleet(guests={"num_cpus": 0, "num_gpus": 0})


def _node_names(fleet: RayFleet) -> dict[str, str]:
    """Names of nodes by their ids."""
    return {node.id: name for name, node in fleet.nodes().items()}


def idle_machines_help(trainable: functools.partial[None], *, tell: Tell = lambda line: None) -> Callback:
    """A callback for `RunConfig(callbacks=[...])`: nodes without a trial join running trials while none waits.

    `trainable`: what `trainable()` returned, without resources added. Guests take none of Ray's resources, and
    leave when a trial starts on their node.
    """
    from potluck.sweep.tune_callback import IdleMachinesHelp

    public: bytes = trainable.args[0].public
    logs = Path(tempfile.mkdtemp(prefix="potluck-sweep-"))
    watches[public] = lambda: TrialWatch(_fleet(), _pairs[public], logs, tell)
    return IdleMachinesHelp(public)


class TrialWatch:
    """The driver's state of the trials, from Tune's callbacks, and the guests that help them."""

    def __init__(
        self,
        fleet: RayFleet,
        keys: sealed.KeyPair,
        logs: Path,
        tell: Tell,
        *,
        share: bool = True,
        names: Sequence[str] = (),
    ) -> None:
        """`names`: the sweep's own names of its trials, in Tune's order."""
        self._fleet = fleet
        self._keys, self._share, self._tell, self._trial_names = keys, share, tell, names
        self._ended: set[str] = set()
        self.news: dict[str, TrialNews] = {}
        self.hosted: dict[str, list[str]] = {}
        """Machines that have hosted each trial, by its id, in this order."""
        self.guests: dict[str, set[str]] = {}
        self._names: dict[str, str] = {}
        self._running: set[str] = set()
        self._takes_s: dict[str, float] = {}
        """Seconds that a trial takes each machine alone."""
        self._waiting = 0
        self._over = threading.Event()
        self._helpers = Helpers(self._fleet, logs, tell)
        self._thread = threading.Thread(target=self._look, name="potluck-sharing", daemon=True)
        self._thread.start()

    def trials(self, trials: Sequence[Any]) -> None:
        """Tune's own view of all trials."""
        self._waiting = sum(trial.status == "PENDING" for trial in trials)
        self._running = {trial.trial_id for trial in trials if trial.status == "RUNNING"}

    def result(self, trial: str, result: Mapping[str, Any]) -> None:
        if NEWS not in result:
            return
        news = checked.decode(result[NEWS], TrialNews)
        if result[NODE] not in self._names:  # asking Ray takes time, and Tune waits for this
            self._names |= _node_names(self._fleet)
        machine = self._names.get(result[NODE], result[NODE][:8])
        hosted = self.hosted.setdefault(trial, [])
        if hosted[-1:] != [machine]:
            hosted.append(machine)
        self.guests[trial] = self.guests.get(trial, set()) | set(news.guests)
        self.news[trial] = news
        if news.remaining_s is not None and (machine not in self._takes_s or not news.guests):
            self._takes_s[machine] = float(result.get("time_total_s", 0.0)) + news.remaining_s

    def ended(self, trial: str, number: int) -> None:
        """Tune says that a trial is over; `number`: its place among all."""
        self._ended.add(trial)
        news = self.news.get(trial, TrialNews())
        loss = news.metrics.get("loss")
        how = ("failed" if news.why else "ended") + ("" if loss is None else f" with loss {loss:.6g}")
        name = self._trial_names[number] if number < len(self._trial_names) else trial
        of = f" of {len(self._trial_names)}" if self._trial_names else ""
        self._tell(f"{name} {how} ({len(self._ended)}{of})")

    def close(self) -> None:
        """End all guests. A second call does nothing."""
        self._over.set()
        self._thread.join()
        self._helpers.close()
        self._fleet.close()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            running = {name: self.hosted[name][-1] for name in self._running if name in self.hosted}
            joinable = {n: self.news[n] for n in running if self.news[n].token and self.news[n].status is None}
            # One that has just begun takes its machine as long as the last one did.
            takes_s = {name: self._takes_s.get(running[name]) for name in joinable}
            remaining = {n: takes_s[n] if v.remaining_s is None else v.remaining_s for n, v in joinable.items()}
            # A trial that has told nothing yet is about to: its node must not be taken.
            waiting = self._waiting + len(self._running) - len(running)
            try:
                machines = self._fleet.machines()
            except Exception:  # of Ray's, of many kinds: its driver has just been disconnected, or a node is lost
                continue
            wanted = helping(machines, running, remaining, dict(self._helpers.busy), waiting=waiting)
            if self._share:
                tokens = {name: self._keys.open(news.token) for name, news in joinable.items()}
                self._helpers.assign(wanted, tokens)


def machine_shape(nodes: Sequence[RayNode], tell: Tell) -> dict[str, float]:
    """Resources by which Ray gives each node one trial: the node's own `potluck`, else its CPUs."""
    resources = [node.resources for node in nodes if node.alive]
    if all(have.get(MACHINE) for have in resources):
        return {MACHINE: 1.0}
    fewest, most = (choose(have.get("CPU", 0.0) for have in resources) for choose in (min, max))
    if most >= 2 * fewest:
        tell(
            f"the nodes have {fewest:.0f} to {most:.0f} CPUs, so that some get several trials at once; "
            f"for one a machine start each with: ray start --resources='{{\"{MACHINE}\": 1}}'"
        )
    return {"CPU": fewest}


def sweep_results(
    work: SweepWork, trials: Sequence[Trial], keys: sealed.KeyPair, settings: SweepSettings
) -> Iterator[TrialResult]:
    """Run the trials with Tune on the Ray cluster that this process is connected to."""
    import ray
    from ray import tune
    from ray.tune.search.basic_variant import BasicVariantGenerator

    from potluck.sweep.tune_callback import IdleMachinesHelp

    names = [trial.id for trial in trials]
    watches[keys.public] = lambda: TrialWatch(
        _fleet(), keys, settings.folder, settings.tell, share=settings.share, names=names
    )
    callback = IdleMachinesHelp(keys.public)
    # Tune is given the words: they go to the script as they were written.
    points = [{**trial.parameters, **trial.given} for trial in trials]
    space = {name: tune.choice(sorted({point[name] for point in points}, key=str)) for name in points[0]}
    train = tune.with_resources(
        functools.partial(host_trial, work, raises=False), machine_shape(nodes_of(ray), settings.tell)
    )
    tuner = tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(
            num_samples=len(trials),
            search_alg=BasicVariantGenerator(points_to_evaluate=points),
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(settings.storage),
            callbacks=[callback],
            failure_config=tune.FailureConfig(max_failures=MOST_STARTS),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            verbose=0,
        ),
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            grid = tuner.fit()
    finally:
        if (watch := callback.watch) is not None:
            watch.close()
    assert watch is not None
    for trial, found in zip(trials, grid):
        yield _result(trial, found, watch, settings.storage)


def _result(trial: Trial, found: Any, watch: TrialWatch, storage: Path) -> TrialResult:
    """What Tune and those who watched the trial know of it at its end."""
    metrics = found.metrics or {}
    name = str(metrics.get("trial_id", ""))
    news = checked.decode(metrics[NEWS], TrialNews) if NEWS in metrics else TrialNews()
    return TrialResult(
        trial=trial.id,
        parameters=trial.parameters,
        given=trial.given,
        metrics=news.metrics,
        steps=news.step,
        seconds=float(metrics.get("time_total_s", 0.0)),
        machines=tuple(watch.hosted.get(name, ())),
        guests=tuple(sorted(watch.guests.get(name, ()))),
        checkpoint=found.checkpoint.path if found.checkpoint else "",
        files=str(files) if (files := kept_files(storage / name)).is_dir() else "",
        error=news.why or (str(found.error) if found.error else ""),
    )
