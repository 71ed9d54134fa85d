"""Sweeps without a cluster: parameters, trials, who helps whom, what is handed over, what is shown."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from potluck.cli._app import Settings
from potluck.cli.sweep import sweep
from potluck.errors import ConfigError, MachineError, MissingModuleError, NetworkError, PotluckError
from potluck.fleet.dask import DaskFleet
from potluck.fleet.interface import GuestEnd, GuestSettings
from potluck.fleet.ray import RayNode
from potluck.fleet.script import Script
from potluck.fleet.sealed import KeyPair, seal
from potluck.spec.events import Logged, to_json
from potluck.sweep import dask_trials, result_table, trial, trial_runs
from potluck.sweep.helpers import Helpers
from potluck.sweep.ray_trials import TrialWatch, machine_shape
from potluck.sweep.sharing import helping, hosts_next
from potluck.sweep.spec import (
    SweepWork,
    Trial,
    TrialNews,
    TrialResult,
    best_of,
    check_options,
    parse_parameters,
    trials_of,
)
from potluck.sweep.trial import TrialProcess, hand_over, handed_over, keep_files
from potluck.sweep.trial_runs import SweepSettings, new_folder, own_storage
from support import sample_events
from support.processes import SOURCE


def test_parameters_are_read_as_what_they_spell() -> None:
    found = parse_parameters(["lr=1e-4,3e-4", "width=64,128", "tied=true,false", "norm=layer,none"])
    trials = trials_of(found, None)
    assert [trials[0].parameters, trials[-1].parameters] == [
        {"lr": 1e-4, "width": 64, "tied": True, "norm": "layer"},
        {"lr": 3e-4, "width": 128, "tied": False, "norm": "none"},
    ]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("-1e-5", -1e-5),
        ("007", "007"),
        ("1.10", 1.1),
        ("1_000", "1_000"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("nan", "nan"),
        ("1e999", "1e999"),
    ],
)
def test_a_script_gets_the_word_that_was_written(word: str, value: object) -> None:
    (trial,) = trials_of(parse_parameters([f"shift={word}"]), None)
    assert trial.parameters == {"shift": value}
    (argument,) = work().words(trial)
    parser = argparse.ArgumentParser()
    parser.add_argument("--shift")
    assert parser.parse_args([argument]).shift == word
    shown = result_table.table([result("a", parameters=trial.parameters, given=trial.given)], "loss", "min")
    assert word in shown[2].plain.split()


@pytest.mark.parametrize("words", [["lr"], ["lr="], ["=3"], ["-x=3"], [], ["lr=1", "lr=2"]])
def test_what_is_no_parameter_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_parameters(words)


def test_the_trials() -> None:
    space = {"lr": (0.1, 0.2), "width": (64, 128)}
    every = trials_of(space, None)
    assert [t.parameters for t in every] == [
        {"lr": 0.1, "width": 64},
        {"lr": 0.1, "width": 128},
        {"lr": 0.2, "width": 64},
        {"lr": 0.2, "width": 128},
    ]
    assert len({t.id for t in trials_of(space, 12)}) == 12
    some = [t.parameters for t in trials_of(space, 3, seed=5)]
    assert some == [t.parameters for t in trials_of(space, 3, seed=5)]
    assert len(some) == 3
    assert all(parameters in [t.parameters for t in every] for parameters in some)
    with pytest.raises(ConfigError):
        trials_of(space, 0)


def work(**more: object) -> SweepWork:
    return SweepWork(names=("t.py",), contents=(b"",), storage="", public=b"", **more)  # type: ignore[arg-type]


def test_a_trial_gets_its_parameters_as_options_or_as_json() -> None:
    trial = Trial(id="t", parameters={"lr": 0.1, "tied": True})
    assert work(arguments=("--steps", "5")).words(trial) == ["--steps", "5", "--lr=0.1", "--tied=true"]
    assert work(json_option="config").words(trial) == ["--config", '{"lr": 0.1, "tied": true}']


def test_an_option_that_the_script_lacks_is_named_before_anything_starts() -> None:
    script = Script(
        names=("t.py",), contents=(b'p = ArgumentParser(); p.add_argument("--lr"); p.add_argument("--batch-size")',)
    )
    told: list[str] = []
    check_options(script, ["lr", "batch-size"], told.append)
    with pytest.raises(ConfigError, match="no option --batch-sise") as caught:
        check_options(script, ["batch-sise"], told.append)
    assert caught.value.hint == "did you mean --batch-size?"
    check_options(Script(names=("t.py",), contents=(b"config = read()",)), ["anything"], told.append)
    assert not told  # running it will tell


@pytest.mark.parametrize(
    "source",
    [
        'parser = HfArgumentParser(Arguments)\nsubprocess.run(["git", "--version"])',
        'parser = ArgumentParser()\nparser.add_argument("--steps")\nlibrary.add_options(parser)',
        'p = ArgumentParser()\np.add_argument("--steps")\nfor name in names: p.add_argument(f"--{name}")',
        'p = ArgumentParser()\np.add_argument("--steps")\np.parse_known_args()',
        'p = library.parser()\np.add_argument("--steps")',
    ],
)
def test_an_option_that_may_come_from_elsewhere_is_a_warning(source: str) -> None:
    told: list[str] = []
    check_options(Script(names=("t.py",), contents=(source.encode(),)), ["lr"], told.append)
    assert len(told) == 1
    assert "--lr" in told[0]


@pytest.mark.parametrize(
    "source",
    ['@click.option("--amp/--no-amp")', 'p.add_argument("--amp", action=argparse.BooleanOptionalAction)'],
)
def test_a_switch_gets_no_value(source: str) -> None:
    script, told = Script(names=("t.py",), contents=(source.encode(),)), list[str]()
    check_options(script, ["amp"], told.append)
    assert not told
    switched = SweepWork(names=script.names, contents=script.contents, storage="", public=b"")
    trials = trials_of(parse_parameters(["amp=true,false"]), None)
    assert [switched.words(trial) for trial in trials] == [["--amp"], ["--no-amp"]]


@pytest.mark.parametrize(
    "source",
    [
        'p.add_argument("-a", "--amp", action="store_true", help="in bf16")',
        "p.add_argument('--amp', default=True, action = 'store_false')",
        '@click.option("--amp", is_flag=True)',
    ],
)
def test_a_flag_is_given_or_left_out(source: str) -> None:
    more = 'p.add_argument("--lr", type=float)\np.add_argument("--name", action="store")'
    flagged = SweepWork(names=("t.py",), contents=(f"{more}\n{source}\n{more}".encode(),), storage="", public=b"")
    trials = trials_of(parse_parameters(["amp=true,false", "name=true"]), None)
    assert [flagged.words(trial) for trial in trials] == [["--amp", "--name=true"], ["--name=true"]]


def result(trial: str, **more: object) -> TrialResult:
    given = {"parameters": {"lr": 0.1}, "metrics": {}, "steps": 5, "seconds": 61.0, "machines": ("desk",)} | more
    return TrialResult(trial=trial, **given)  # type: ignore[arg-type]


def test_the_best_trial_and_a_metric_that_nobody_reports() -> None:
    results = [result("a", metrics={"loss": 2.0, "acc": 0.5}), result("b", metrics={"loss": 1.0, "acc": 0.4})]
    results.append(result("c", error="boom", metrics={"loss": 0.0}))
    assert best_of(results, "loss", "min") == results[1]
    assert best_of(results, "acc", "max") == results[0]
    with pytest.raises(ConfigError, match="no trial reported 'f1'") as caught:
        best_of(results, "f1", "max")
    assert "acc, loss" in str(caught.value.hint)
    assert best_of(results[2:], "loss", "min") is None


def test_a_metric_that_ended_as_nan_ranks_behind_all(tmp_path: Path) -> None:
    trial = object.__new__(TrialProcess)
    trial._news, trial._name = TrialNews(), "desk"
    for value in (0.01, None):
        trial._hear(to_json(Logged(step=1, values={"val": value})))
    assert trial._news.metrics == {"val": None}
    lost = result("a", metrics=trial._news.metrics)
    for mode in ("min", "max"):
        results = [lost, result("b", metrics={"val": 0.5}), result("c", metrics={"val": -0.5})]
        best = best_of(results, "val", mode)
        assert best is not None
        assert best.trial == {"min": "c", "max": "b"}[mode]
        lines = [line.plain for line in result_table.table(results, "val", mode)]
        assert lines[-1].split()[:3] == ["a", "0.1", "nan"]
    assert best_of([lost], "val", "min") is None
    result_table.plot(tmp_path / "s.png", results, "val", "title")
    assert msgspec.json.decode(msgspec.json.encode(trial._news), type=TrialNews) == trial._news


def test_the_loss_of_the_last_step_counts_even_if_it_is_nan() -> None:
    trial = object.__new__(TrialProcess)
    trial._news, trial._name = TrialNews(), "desk"
    for step, loss in ((1, 0.5), (2, None)):
        trial._hear(to_json(sample_events.step(step, loss=loss)))
    assert trial._news.metrics == {"loss": None}


def test_the_table_has_the_best_first_and_the_failed_last() -> None:
    results = [
        result("trial-1", metrics={"loss": 2.0}),
        result("trial-2", error="ended with status 1: boom"),
        result("trial-3", metrics={"loss": 1.0}, machines=("mac", "desk"), guests=("old",)),
    ]
    lines = [line.plain for line in result_table.table(results, "loss", "min")]
    assert [line.split()[0] for line in lines[2:]] == ["trial-3", "trial-1", "trial-2"]
    assert "mac → desk" in lines[2]
    assert "old" in lines[2]
    assert "boom" in lines[4]


def test_the_plot(tmp_path: Path) -> None:
    results = [
        result(f"t{n}", parameters={"lr": 10.0**-n, "norm": "ab"[n % 2]}, metrics={"loss": n}) for n in range(1, 5)
    ]
    result_table.plot(tmp_path / "s.png", results, "loss", "title")
    assert (tmp_path / "s.png").read_bytes()[1:4] == b"PNG"
    assert list(tmp_path.iterdir()) == [tmp_path / "s.png"]


@pytest.mark.parametrize(("engine", "module"), [("dask", "distributed"), ("tune", "ray")])
def test_a_missing_engine_is_one_line_with_the_command(
    engine: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.tune", None)
    (tmp_path / "t.py").write_text("")
    done = CliRunner().invoke(
        sweep,
        [str(tmp_path / "t.py"), "--param", "lr=1", "--engine", engine, "--runs", str(tmp_path)],
        obj=Settings(),
    )
    assert isinstance(done.exception, MissingModuleError)
    assert "pip install -e '.[" in str(done.exception.hint)
    assert list(tmp_path.iterdir()) == [tmp_path / "t.py"]


# -- who helps whom -------------------------------------------------------------------------------------


def test_idle_machines_help_only_when_no_trial_waits() -> None:
    machines = ["desk", "ann", "ben"]
    hosts, remaining = {"t1": "desk"}, {"t1": 60.0}
    assert helping(machines, hosts, remaining, {}, waiting=0) == {"ann": "t1", "ben": "t1"}
    assert helping(machines, hosts, remaining, {}, waiting=1) == {"ben": "t1"}
    assert helping(machines, hosts, remaining, {}, waiting=2) == {}
    assert helping(machines, hosts, remaining, {}, waiting=9) == {}


def test_a_machine_that_gets_a_trial_goes_back_and_others_stay_where_they_are() -> None:
    hosts = {"t1": "desk", "t2": "ann"}
    now = {"ann": "t1", "ben": "t1", "cem": "t1"}
    found = helping(["desk", "ann", "ben", "cem"], hosts, {"t1": 10.0, "t2": 90.0}, now, waiting=0)
    assert found == {"ben": "t1", "cem": "t1"}


def test_newcomers_go_to_the_trials_with_the_most_left() -> None:
    hosts = {"t1": "a", "t2": "b"}
    found = helping(["a", "b", "c", "d"], hosts, {"t1": 50.0, "t2": 60.0}, {}, waiting=0)
    assert found == {"c": "t2", "d": "t1"}
    # One that has just begun has the most left; one that cannot be joined yet gets nobody.
    assert helping(["a", "b", "c"], hosts, {"t1": 50.0, "t2": None}, {}, waiting=0) == {"c": "t2"}
    assert helping(["a", "b", "c"], hosts, {"t1": 50.0}, {}, waiting=0) == {"c": "t1"}
    assert helping(["a", "b", "c"], hosts, {}, {}, waiting=0) == {}


FRIENDS_S = {"desk": 63.0, "ann": 126.0, "ben": 252.0, "cem": 504.0}
"""Seconds of a trial on each machine."""


def test_a_machine_that_would_be_the_last_with_its_trial_helps_instead() -> None:
    # After 252 s three trials wait. Without ben, desk and ann are done with them after 189 s.
    busy_s = {"desk": 63.0, "ann": 126.0, "cem": 252.0}
    assert not hosts_next("ben", FRIENDS_S, busy_s, waiting=2)
    assert hosts_next("ben", FRIENDS_S, busy_s, waiting=5)
    assert hosts_next("ann", FRIENDS_S, {"desk": 63.0, "ben": 9.0, "cem": 9.0}, waiting=2)


def test_every_trial_is_begun_whatever_is_known_of_the_machines() -> None:
    assert all(hosts_next("desk", FRIENDS_S, {}, waiting=n) for n in (1, 2, 12))
    assert hosts_next("new", FRIENDS_S, {}, waiting=1)
    assert hosts_next("cem", {"cem": 504.0}, {}, waiting=1)
    equal = {"a": 60.0, "b": 60.0}
    assert all(hosts_next(name, equal, {}, waiting=1) for name in equal)


def test_a_sweep_with_sharing_leaves_the_last_trials_to_the_fast_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(dask_trials.threading.Thread, "start", lambda thread: None)
    workers = {f"tcp://{name}": {"name": name} for name in ("desk", "cem")}
    client: Any = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    work: Any = SimpleNamespace()
    for share, expected in ((True, {"t2": "desk"}), (False, {"t2": "desk", "t3": "cem"})):
        trials = [Trial(id=f"t{n}", parameters={}) for n in (2, 3)]
        sweep = dask_trials.DaskSweep(client, work, trials, KeyPair(), logs=tmp_path, share=share)
        sweep._took_s |= {"desk": 63.0, "cem": 504.0}
        sweep._place()
        assert sweep.hosts() == expected


class PretendGuest:
    """A guest that stays until it is ended or told that its trial is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.ended = False

    def wait(self, timeout_s: float) -> GuestEnd | None:
        return GuestEnd(0, "") if self.over.wait(timeout_s) else None

    def end(self, patience_s: float = 2.0) -> GuestEnd:
        self.ended = True
        self.over.set()
        return GuestEnd(0, "")


class PretendFleet:
    """Keeps what it was asked to start."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str, PretendGuest]] = []
        self.broken = False

    def machines(self) -> Sequence[str]:
        return ("ann", "ben")

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> PretendGuest:
        if self.broken:
            raise MachineError("no such machine")
        guest = PretendGuest()
        self.started.append((machine, token, guest))
        return guest

    def close(self) -> None: ...


def until(reached: Callable[[], object]) -> None:
    gone = threading.Event()
    for _ in range(2000):
        if reached():
            return
        gone.wait(0.01)
    raise AssertionError("not reached")


def test_helpers_join_change_and_go_back(tmp_path: Path) -> None:
    fleet, told = PretendFleet(), list[str]()
    helpers = Helpers(fleet, tmp_path, told.append)
    try:
        helpers.assign({"ann": "t1"}, {"t1": "token-1"})
        until(lambda: helpers.busy == {"ann": "t1"})
        helpers.assign({"ann": "t2"}, {"t1": "token-1", "t2": "token-2"})
        until(lambda: helpers.busy == {"ann": "t2"})
        assert [(machine, token) for machine, token, _ in fleet.started] == [("ann", "token-1"), ("ann", "token-2")]
        assert fleet.started[0][2].ended
        fleet.started[1][2].over.set()  # its trial ends: it does not join it again
        until(lambda: not helpers.busy)
        helpers.assign({"ann": "t2"}, {"t2": "token-2"})
        helpers.assign({}, {})
        assert len(fleet.started) == 2
        fleet.broken = True
        helpers.assign({"ben": "t3"}, {"t3": "token-3"})
        until(lambda: "ben cannot help t3: no such machine" in told)
    finally:
        helpers.close()


# -- with Ray Tune --------------------------------------------------------------------------------------


class PretendNodes(PretendFleet):
    """Two nodes of a Ray cluster."""

    def nodes(self) -> dict[str, RayNode]:
        return {name: RayNode(id=number * 56, alive=True) for name, number in (("ann", "1"), ("ben", "2"))}


def news(keys: KeyPair, **more: object) -> dict[str, str]:
    told = TrialNews(token=seal("token-1", keys.public), **more)  # type: ignore[arg-type]
    return {"potluck_node": "1" * 56, "potluck_news": msgspec.json.encode(told).decode()}


def test_an_idle_node_helps_what_tune_tells_of_and_goes_back(tmp_path: Path) -> None:
    fleet, keys = PretendNodes(), KeyPair()
    watch = TrialWatch(fleet, keys, tmp_path, lambda line: None)  # type: ignore[arg-type]
    try:
        trials = [SimpleNamespace(trial_id="a", status="RUNNING"), SimpleNamespace(trial_id="b", status="PENDING")]
        watch.trials(trials)
        watch.result("a", news(keys, step=3, remaining_s=50.0))
        trials[1].status = "TERMINATED"
        watch.trials(trials)
        until(lambda: [(machine, token) for machine, token, _ in fleet.started] == [("ben", "token-1")])
        trials[1].status = "RUNNING"  # it has told nothing yet: on which node it is, is not known
        watch.trials(trials)
        until(lambda: fleet.started[0][2].ended)
        watch.result("a", news(keys, step=4, guests=("ben",)))
        assert (watch.hosted["a"], watch.guests["a"]) == (["ann"], {"ben"})
    finally:
        watch.close()
    assert len(fleet.started) == 1


def test_each_trial_of_tune_that_ends_is_told_of_at_once(tmp_path: Path) -> None:
    keys, told = KeyPair(), list[str]()
    watch = TrialWatch(PretendNodes(), keys, tmp_path, told.append, share=False, names=["trial-1", "trial-2"])  # type: ignore[arg-type]
    try:
        watch.result("b", news(keys, step=5, metrics={"loss": 0.25}))
        watch.ended("b", 1)
        watch.result("a", news(keys, step=1, why="ended with status 1"))
        watch.ended("a", 0)
    finally:
        watch.close()
    assert told == ["trial-2 ended with loss 0.25 (1 of 2)", "trial-1 failed (2 of 2)"]


def test_one_trial_a_node() -> None:
    told: list[str] = []

    def shape(*resources: dict[str, float]) -> dict[str, float]:
        return machine_shape([RayNode(id="1", alive=True, resources=have) for have in resources], told.append)

    assert shape({"CPU": 16, "potluck": 1}, {"CPU": 2, "potluck": 1}) == {"potluck": 1.0}
    assert shape({"CPU": 6}, {"CPU": 8}) == {"CPU": 6}
    assert not told
    assert shape({"CPU": 16}, {"CPU": 4, "potluck": 1}) == {"CPU": 4}
    assert "ray start" in told[0]


@pytest.mark.parametrize(
    ("address", "failing", "kind"),
    [
        (None, {"local": Exception("The current node timed out\nmore")}, MachineError),
        ("local", {"local": RuntimeError("")}, MachineError),
        (None, {"auto": RuntimeError("Version mismatch\nmore")}, NetworkError),
        ("desk:6379", {"desk:6379": ValueError("bad address\nmore")}, NetworkError),
    ],
)
def test_a_ray_that_cannot_start_is_one_line(
    address: str | None, failing: dict[str, Exception], kind: type[PotluckError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str, **_: object) -> None:
        raise failing.get(address) or ConnectionError("no cluster")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        trial_runs._connect_ray(settings(address))
    assert "more" not in caught.value.what
    assert caught.value.hint


# -- with Dask ------------------------------------------------------------------------------------------


def settings(address: str | None) -> SweepSettings:
    given = {"json_option": None, "checkpoint_every": 5, "share": True, "tell": lambda line: None, "trials": ()}
    folders = {"folder": Path("none"), "storage": Path("none")}
    return SweepSettings(script=Script(names=(), contents=()), address=address, **given, **folders)  # type: ignore[arg-type]


def test_the_local_dask_cluster_takes_no_work_from_strangers() -> None:
    distributed = pytest.importorskip("distributed")
    with trial_runs._dask(settings("local")) as client:
        place = client.scheduler.address
        assert place.startswith("tls://127.0.0.1:")
        assert all(worker.startswith("tls://") for worker in client.nthreads())
        with pytest.raises((OSError, TimeoutError)):
            distributed.Client(place.replace("tls:", "tcp:"), timeout=0.5)
        with pytest.raises((OSError, TimeoutError)):
            distributed.Client(place, security=distributed.Security.temporary(), timeout=0.5)


def test_all_workers_of_a_large_cluster_are_found() -> None:
    every = {f"tcp://10.0.0.{n}:1": {"name": f"m{n}"} for n in range(9)}

    class Truncating:
        def scheduler_info(self, n_workers: int = 5) -> dict[str, object]:
            return {"workers": dict(list(every.items())[: None if n_workers == -1 else n_workers])}

    class Older:
        def scheduler_info(self, **kwargs: object) -> dict[str, object]:
            assert not kwargs
            return {"workers": every}

    for client in (Truncating(), Older()):
        assert len(DaskFleet(client).machines()) == 9  # type: ignore[arg-type]


# -- checkpoints ----------------------------------------------------------------------------------------


def make_run(folder: Path, step: int) -> Path:
    for name in ("manifest.json", "events.jsonl", "keys.json", "token"):
        (folder / name).write_text(name)
    (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (folder / "checkpoints" / f"step-{step:08d}" / "weights").write_text(str(step))
    return folder


def test_what_is_handed_over_is_whole_new_and_without_secrets(tmp_path: Path) -> None:
    run, storage = tmp_path / "run", tmp_path / "storage" / "trial-1"
    run.mkdir()
    origin = work().origin(Trial(id="trial-1", parameters={"lr": 0.1}))
    assert handed_over(storage) is None
    for step in (5, 10):
        hand_over(make_run(run, step), step, storage, origin)
    found = handed_over(storage)
    assert found == storage / "step-00000010"
    assert [path.name for path in storage.iterdir()] == ["step-00000010"]
    names = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    assert names == {"manifest.json", "events.jsonl", "trial.json", "checkpoints/step-00000010/weights"}
    # A checkpoint that has been removed meanwhile leaves the last one in place.
    assert hand_over(run, 15, storage, origin) is None
    assert handed_over(storage) == found
    assert len(list(storage.iterdir())) == 1


def test_files_that_a_script_wrote_are_kept_and_those_that_were_sent_are_not(tmp_path: Path) -> None:
    folder, storage = tmp_path / "script", tmp_path / "trial-1"
    for name in ("t.py", "lib/m.py", "lib/__pycache__/m.pyc", "best.pt", "plots/loss.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    keep_files(folder, ("t.py", "lib/m.py"), storage)
    kept = {path.relative_to(storage).as_posix() for path in storage.rglob("*") if path.is_file()}
    assert kept == {"files/best.pt", "files/plots/loss.png"}


def test_a_trial_never_resumes_from_another_sweeps_checkpoint(tmp_path: Path) -> None:
    run, storage = tmp_path / "run", tmp_path / "trial-1"
    run.mkdir()
    trial, other = Trial(id="trial-1", parameters={"lr": 0.1}), Trial(id="trial-1", parameters={"lr": 0.2})
    ours = SweepWork(names=("t.py",), contents=(b"",), storage="", public=b"ours")
    theirs = SweepWork(names=("t.py",), contents=(b"",), storage="", public=b"theirs")
    handed = hand_over(make_run(run, 5), 5, storage, ours.origin(trial))
    assert handed_over(storage, ours.origin(trial)) == handed == storage / "step-00000005"
    assert handed_over(storage, theirs.origin(trial)) is None
    assert handed_over(storage, ours.origin(other)) is None
    (storage / "step-00000005" / "trial.json").write_text("{}")
    assert handed_over(storage, ours.origin(trial)) is None


def test_a_dask_trial_starts_anew_beside_a_foreign_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path | None] = []

    class Ended:
        def __init__(self, *_: object, start_from: Path | None, **__: object) -> None:
            given.append(start_from)

        def news(self) -> TrialNews:
            return TrialNews(status=0)

        def checkpoint_to(self, storage: Path) -> None: ...
        def keep_files(self, storage: Path) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(dask_trials, "TrialProcess", Ended)
    trial, checkpoint = Trial(id="trial-1", parameters={"lr": 0.1}), tmp_path / "trial-1" / "step-00000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    ours = SweepWork(names=("t.py",), contents=(b"",), storage=str(tmp_path), public=b"ours")
    dask_trials.host_trial(ours, trial, "key", "desk", None, 1)
    (checkpoint / "trial.json").write_bytes(msgspec.json.encode(ours.origin(trial)))
    dask_trials.host_trial(ours, trial, "key", "desk", None, 1)
    assert given == [None, checkpoint]


def test_two_sweeps_of_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "sweep-20260101-000000-train"
    folders = [new_folder(wanted) for _ in range(3)]
    assert [folder.name.removeprefix(wanted.name) for folder in folders] == ["", "-2", "-3"]
    assert all(folder.is_dir() for folder in folders)
    # Two drivers with the same storage may have runs folders of their own, and the same name in each.
    shared = tmp_path / "shared"
    stored = [own_storage(shared, wanted), own_storage(shared, wanted)]
    assert len(set(stored)) == 2
    assert all(folder.parent == shared for folder in stored)
    assert own_storage(None, wanted) == wanted / "checkpoints"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the agent is for POSIX")
def test_the_next_trial_takes_the_process_that_was_started_for_it_and_unwanted_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trial, "SPARE_LIVES_S", 0.2)
    spares = trial.Spares()
    monkeypatch.setattr(trial, "spares", spares)
    for _ in range(3):
        spares.start("desk")  # a trial says so again and again
    until(lambda: spares._spare is not None)
    (folder,) = tmp_path.glob("potluck-trial-*")
    script = b"import sys, pathlib; pathlib.Path('seen').write_text(' '.join(sys.argv[1:]))"
    process = TrialProcess(
        SweepWork(names=("t.py",), contents=(script,), storage="", public=KeyPair().public),
        Trial(id="t", parameters={"lr": 0.1}),
        name="desk",
    )
    assert list(tmp_path.glob("potluck-trial-*")) == [folder]
    until(lambda: process.news().status is not None)
    assert (folder / "script" / "seen").read_text() == "--lr=0.1"
    process.close()
    assert spares.take() is None
    spares.start("desk")
    until(lambda: spares._spare is not None)
    spares.soon_unwanted()
    until(lambda: not list(tmp_path.glob("potluck-trial-*")))
    until(lambda: spares._thread is None)


HOSTING = """
from potluck.sweep.spec import SweepWork, Trial
from potluck.sweep.trial import TrialProcess

work = SweepWork(names=("t.py",), contents=(b"import time; time.sleep(600)",), storage="", public=b"")
process = TrialProcess(work, Trial(id="t", parameters={}), name="desk")
print("hosting", flush=True)
input()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the agent is for POSIX")
def test_a_killed_worker_leaves_no_folder_of_its_trial(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOSTING], env=variables, **pipes) as worker:  # type: ignore[call-overload]
        try:
            assert worker.stdout.readline().strip() == b"hosting"
            assert len(list(tmp_path.glob("potluck-trial-*"))) == 1
        finally:
            worker.kill()
    until(lambda: not list(tmp_path.glob("potluck-trial-*")))
