"""Sweeps on real clusters: each trial is reported once whatever happens, and idle machines help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from potluck.fleet.script import read_script
from potluck.fleet.sealed import KeyPair
from potluck.sweep.spec import SweepWork, TrialNews, TrialResult, trials_of
from potluck.sweep.trial import handed_over
from support.processes import SOURCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at processes in /proc"),
]

SCRIPT = """
import argparse, os

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--until")
options = parser.parse_args()
if options.lr < 0:
    raise ValueError("a negative learning rate")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import potluck

torch.manual_seed(1)
points = torch.randn(600, 8)
run = potluck.start()
model = nn.Linear(8, 2).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
loader = DataLoader(TensorDataset(points, (points.sum(1) > 0).long()), 20, shuffle=True)
for step in run.steps(model, optimizer, loader, steps=100_000):
    if os.path.exists(options.until):
        break
    for batch, labels in step:
        step.backward(nn.functional.cross_entropy(model(batch), labels))
run.log(final=options.lr)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.fixture
def dask() -> Iterator[str]:
    """The address of a scheduler with two workers, on paced devices."""
    distributed = pytest.importorskip("distributed")
    before = {name: os.environ.get(name) for name in ("POTLUCK_DEVICE", "PYTHONPATH")}
    os.environ |= {"POTLUCK_DEVICE": "paced:0.005", "PYTHONPATH": str(SOURCE)}
    try:
        cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    with cluster:
        yield cluster.scheduler_address


@pytest.mark.clusters
def test_a_lost_trial_goes_on_from_its_checkpoint_and_idle_machines_help(
    dask: str, script: Path, tmp_path: Path
) -> None:
    from distributed import Client

    from potluck.sweep.dask_trials import DaskSweep

    found, keys, told = read_script(script), KeyPair(), list[str]()
    storage, until = tmp_path / "storage", tmp_path / "until"
    work = SweepWork(
        names=found.names,
        contents=found.contents,
        arguments=("--until", str(until)),
        checkpoint_every=5,
        storage=str(storage),
        public=keys.public,
    )
    with Client(dask) as client:
        trials = trials_of({"lr": (0.1, -1.0)}, None)
        sweep = DaskSweep(client, work, trials, keys, logs=tmp_path, tell=told.append)
        results: list[TrialResult] = []

        def news_of(trial: str) -> TrialNews:
            hosted = sweep._running.get(trial)
            return hosted.news if hosted is not None else TrialNews()

        running = threading.Thread(target=lambda: results.extend(sweep.run()), name="sweep")
        running.start()
        try:
            # The second trial fails at once, and its machine joins the first one.
            news = _wait(lambda: (n := news_of("trial-1")).checkpoint and n.guests and n.token and n, 90)
            token, saved, host = keys.open(news.token), news.checkpoint, sweep.hosts()["trial-1"]
            pid = client.run(os.getpid, workers=[sweep.fleet.workers()[host]]).popitem()[1]
            os.kill(pid, signal.SIGKILL)
            # The guest goes back, for the trial goes on; on which machine is the cluster's matter.
            _wait(lambda: (news_of("trial-1").resumed_from or 0) >= saved, 90)
        finally:
            until.touch()
            running.join()
        told_by = (client.get_scheduler_logs(), client.get_worker_logs(), client.get_events())
        assert token[-40:] not in json.dumps(told_by, default=str)
    assert sorted(result.trial for result in results) == ["trial-1", "trial-2"]
    first, second = sorted(results, key=lambda result: result.trial)
    assert "negative learning rate" in second.error
    assert first.error == "", told
    assert first.metrics["final"] == 0.1
    assert first.steps >= saved
    assert first.guests
    assert len(first.machines) >= 2, told
    assert handed_over(storage / "trial-1") == Path(first.checkpoint)
    assert not [p for p in storage.rglob("*") if p.name in ("token", "keys.json")]


def test_nothing_outlives_a_killed_driver(dask: str, script: Path, tmp_path: Path) -> None:
    words = ["-m", "potluck", "sweep", str(script), "--param", "lr=0.1,0.2,0.3", "--engine", "dask"]
    words += ["--address", dask, "--runs", str(tmp_path / "runs"), "--", "--until", str(tmp_path / "never")]
    variables = {**os.environ, "PYTHONPATH": str(SOURCE)}
    driver = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, env=variables)
    assert driver.stderr is not None

    def ours() -> list[int]:
        return [p.pid for p in psutil.Process().children(recursive=True) if "potluck.sweep.warm" in _words(p)]

    try:
        _wait(lambda: len(ours()) == 2, 60)
    finally:
        driver.kill()
        driver.wait()
        driver.stderr.close()
    _wait(lambda: not ours(), 10)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _wait(reached: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.05)
    return found


def test_ctrl_c_ends_a_local_dask_sweep_cleanly_and_files_of_what_ended_are_there(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all processes: Dask's worker must not answer with a traceback."""
    text = SCRIPT.replace("steps=100_000)", "steps=3 if options.lr < 0.15 else 100_000)")
    (tmp_path / "train.py").write_text(f"{text}\nopen('note.txt', 'w').write(str(options.lr))\n")
    words = ["sweep", "train.py", "--param", "lr=0.1,0.2", "--engine", "dask", "--address", "local"]
    command = [sys.executable, "-m", "potluck", *words, "--runs", "runs", "--", "--until", "never"]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as sweep:
        assert sweep.stderr is not None
        told = []
        for line in sweep.stderr:
            told.append(line)
            if line.startswith("trial-2 starts"):
                os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(60) == 130
    said = "".join(told)
    assert "trial-1 ended with loss" in said
    assert "(1 of 2)" in said
    assert said.rstrip().endswith("interrupted")
    assert "Traceback" not in said
    (note,) = tmp_path.glob("runs/*/checkpoints/trial-1/files/*")
    assert (note.name, note.read_text()) == ("note.txt", "0.1")
