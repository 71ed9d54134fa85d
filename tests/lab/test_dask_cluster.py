"""A Dask cluster in network namespaces is a fleet: a run on its workers, one of which is lost."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.lab import permission
from potluck.lab.namespaces import NamespaceBox
from support.rigs import SOURCE, rig

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.slow,
    pytest.mark.skipif(permission.why_not() is not None, reason=str(permission.why_not())),
    pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs the extra dask"),
]

SCRIPT = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import potluck

torch.manual_seed(1)
points = torch.randn(600, 8)
run = potluck.start()
model = nn.Linear(8, 2).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(points, (points.sum(1) > 0).long()), 20, shuffle=True)
for step in run.steps(model, optimizer, loader, steps=100_000):
    if os.path.exists(sys.argv[1]):
        break
    for batch, labels in step:
        step.backward(nn.functional.cross_entropy(model(batch), labels))
"""

DRIVER = """
import sys
from distributed import Client
import potluck.dask
from potluck.spec.events import to_json

address, script, runs, until, bind = sys.argv[1:]
fleet = potluck.dask.Fleet(Client(address))
with fleet.start(script, [until], runs=runs, options=["--bind", bind, "--device", "paced:0.01"]) as run:
    for event in run.events():
        print(to_json(event).decode(), flush=True)
print("checkpoint", run.result().checkpoint, flush=True)
"""


def wait_for(reached: Callable[[], object], log: Path, seconds: float = 140.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def test_workers_of_other_machines_take_part_and_one_is_lost(tmp_path: Path) -> None:
    machines = ({"name": "desk", "role": "host"}, {"name": "ann", "link_mbit": 50}, {"name": "ben"})
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "driver.py").write_text(DRIVER)
    own = {**os.environ, "PYTHONPATH": str(SOURCE), "POTLUCK_DEVICE": "paced:0.02"}
    with NamespaceBox(rig(*machines)) as box:
        host, until = box.address("desk"), tmp_path / "until"
        words = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host, "--port", "8786"]
        box.start("desk", [*words, "--no-dashboard"], env=own, log=tmp_path / "scheduler")
        workers = {}
        for name in ("ann", "ben"):
            words = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://{host}:8786", "--no-nanny"]
            words += ["--nthreads", "1", "--name", name, "--host", box.address(name), "--no-dashboard"]
            workers[name] = box.start(name, words, env=own, log=tmp_path / name)
        words = [str(tmp_path / name) for name in ("train.py", "runs")] + [str(until), host]
        log = tmp_path / "driver"
        driver = box.start(
            "desk", [sys.executable, str(tmp_path / "driver.py"), f"tcp://{host}:8786", *words], env=own, log=log
        )

        def told(kind: str) -> list[str]:
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            # On a busy box one may be lost and come again, as ben-2.
            return [event["machine"].partition("-")[0] for event in lines if event["event"] == kind]

        wait_for(lambda: set(told("guest_joined")) == {"ann", "ben"} or driver.poll() is not None, log)
        workers["ben"].kill()
        wait_for(lambda: {"ben"} & {*told("guest_lost"), *told("guest_left")} or driver.poll() is not None, log, 20)
        until.touch()
        assert driver.wait(60) == 0, log.read_text()[-3000:]
        token = next((tmp_path / "runs").glob("*/token"))
        secret = token.read_text().strip()[-40:]
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path for path in files if secret in path.read_text(errors="replace")] == [token]
        assert "checkpoint" in log.read_text().splitlines()[-1]
