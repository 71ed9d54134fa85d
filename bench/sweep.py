"""Sweeps on unequal machines: how long 12 equal trials take, and what happens when a machine dies in mid-trial.

    .venv/bin/python bench/sweep.py [--only dask,dask-shared,tune,tune-shared,kills] [--steps 10] [--count 50]

dask, tune          the engine alone, on the rig three-friends (paced devices, shaped links, one worker a machine)
dask-shared,        `potluck sweep`: idle machines join the running trials
tune-shared
kills               --count sweeps of two trials on a Dask cluster of two workers. The worker of a running trial is
                    killed with -9 at a random moment: the trial must go on from its checkpoint, and each must be
                    reported once

Printed for each: makespan ÷ (Σ work ÷ Σ speed), 1.00 if no machine is ever idle. Needs root on Linux, but kills.
Exits with 1 if a shared one is above 1.10, or a kill was not survived.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from potluck.lab.namespaces import NamespaceBox  # noqa: E402
from potluck.lab.rigs import load  # noqa: E402

TRIALS, BATCH, BAR, START_S = 12, 90, 1.10, 240.0
MODES = ("dask", "dask-shared", "tune", "tune-shared", "kills")

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import potluck

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--steps", type=int)
options = parser.parse_args()
torch.manual_seed(1)
points = torch.randn(5000, 32)
run = potluck.start()
# 3.3 M parameters, 13.2 MB of gradients: those of the rig's own workload.
sizes = (32, 1270, 1270, 1270)
layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(1270, 10)).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
loader = DataLoader(TensorDataset(points, points[:, :10].argmax(1)), 90, shuffle=True)
for step in run.steps(model, optimizer, loader, steps=options.steps):
    for batch, labels in step:
        step.backward(nn.functional.cross_entropy(model(batch), labels))
"""

PLAIN = """
# Dask as people use it: a trial is a task, and Dask decides where and when it runs.
import json, subprocess, sys, time
from distributed import Client, as_completed

def trial(number, words):
    subprocess.run(words + ["--lr", str(0.01 + number / 1000)], check=True, stdout=subprocess.DEVNULL)
    return number

if __name__ == "__main__":
    address, script, steps, runs, count = sys.argv[1:]
    words = [sys.executable, "-m", "potluck", "host", script, "--runs", runs, "--view", "quiet"]
    words += ["--bind", "127.0.0.1", "--threads", "1", "--checkpoint-every", "0", "--", "--steps", steps]
    client = Client(address)
    began = time.monotonic()
    futures = client.map(trial, range(int(count)), words=words, pure=False)
    done = [future.result() for future in as_completed(futures)]
    print(json.dumps({"seconds": time.monotonic() - began, "trials": done}), file=sys.stderr)
"""


def environment(machine: Any = None) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {"RAY_raylet_start_wait_time_s": "240", "RAY_worker_niceness": "0"}
    if machine is not None:
        own |= {"POTLUCK_DEVICE": f"paced:{machine.seconds_per_sample}", "POTLUCK_NAME": machine.name}
    return {**os.environ, **own}


@contextlib.contextmanager
def dask_cluster(box: NamespaceBox, rig: Any, folder: Path) -> Iterator[str]:
    host = box.address(rig.host.name)
    words = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host, "--port", "8786"]
    started = [box.start(rig.host.name, [*words, "--no-dashboard"], env=environment(), log=folder / "scheduler")]
    for machine in rig.machines:
        words = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://{host}:8786", "--no-dashboard"]
        words += ["--nthreads", "1", "--name", machine.name, "--host", box.address(machine.name), "--no-nanny"]
        started.append(box.start(machine.name, words, env=environment(machine), log=folder / machine.name))
    wait_for(lambda: (folder / "scheduler").read_text().count("Register worker") == len(rig.machines), folder)
    yield f"tcp://{host}:8786"
    end(started)


@contextlib.contextmanager
def ray_cluster(box: NamespaceBox, rig: Any, folder: Path) -> Iterator[str]:
    started = []
    address = f"{box.address(rig.host.name)}:6379"
    for machine in rig.machines:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0"]
        words += [f"--node-ip-address={box.address(machine.name)}", f"--node-name={machine.name}"]
        words += ['--resources={"potluck": 1}', "--object-store-memory=80000000"]
        short = tempfile.mkdtemp(prefix="rs-", dir="/tmp")
        head = ["--head", "--port=6379", f"--temp-dir={short}", "--include-dashboard=false"]
        words += head if machine is rig.host else [f"--address={address}"]
        log = folder / machine.name
        started.append(box.start(machine.name, words, env=environment(machine), log=log))
        wait_for(lambda log=log: "Ray runtime started" in log.read_text(), folder)
    yield address
    end(started)


def end(started: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(started):
        process.terminate()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def wait_for(reached: Any, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit("the cluster did not start:\n" + "\n".join(p.read_text() for p in folder.iterdir()))
        time.sleep(0.2)


def makespan_s(mode: str, steps: int) -> float:
    """Seconds that the trials took on the rig."""
    rig = load("three-friends")
    engine, _, shared = mode.partition("-")
    with tempfile.TemporaryDirectory(prefix="sweep-") as made, NamespaceBox(rig) as box:
        folder = Path(made)
        (folder / "logs").mkdir()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "plain.py").write_text(PLAIN)
        cluster = dask_cluster if engine == "dask" else ray_cluster
        with cluster(box, rig, folder / "logs") as address:
            if mode == "dask":
                words = [sys.executable, str(folder / "plain.py"), address, str(folder / "train.py"), str(steps)]
                words += [str(folder / "runs"), str(TRIALS)]
            else:
                rates = ",".join(str(0.01 + n / 1000) for n in range(TRIALS))
                words = [sys.executable, "-m", "potluck", "sweep", str(folder / "train.py"), "--json"]
                words += ["--param", f"lr={rates}", "--engine", engine, "--address", address]
                words += ["--runs", str(folder / "runs"), "--checkpoint-every", "0"]
                words += ["--share" if shared else "--no-share", "--", "--steps", str(steps)]
            log = folder / "driver"
            driver = box.start(rig.host.name, words, env=environment(), log=log)
            status = driver.wait()
            text = log.read_text()
            if status:
                raise SystemExit(f"{mode}: status {status}\n{text[-4000:]}")
            found = json.JSONDecoder().raw_decode(text[text.index('{"seconds"' if mode == "dask" else "{\n") :])[0]
            assert len(found["trials"]) == TRIALS
            if shared:
                print(*(line for line in text.splitlines() if "helps" in line), sep="\n", file=sys.stderr)
            return float(found["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=10, help="of each trial; 6.3 s each on the fastest machine")
    parser.add_argument("--count", type=int, default=50, help="kills")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it every start compiles Potluck again
    rig = load("three-friends")
    speed = sum(1 / machine.seconds_per_sample for machine in rig.machines)
    least_s = TRIALS * options.steps * BATCH / speed
    print(f"{TRIALS} trials of {options.steps} steps: at least {least_s:.0f} s", flush=True)
    found: dict[str, Any] = {"least_s": least_s}
    missed = False
    for mode in options.only.split(","):
        if mode == "kills":
            good = survivors(options.count)
            print(f"kills: {good} of {options.count} survived", flush=True)
            found[mode], missed = good, missed or good < options.count
            continue
        seconds = makespan_s(mode, options.steps)
        found[mode] = seconds
        missed = missed or (mode.endswith("shared") and seconds / least_s > BAR)
        print(f"{mode:12} {seconds:7.1f} s   {seconds / least_s:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    raise SystemExit(missed)


def survivors(count: int) -> int:
    """How many of so many sweeps reported each trial once, and the killed one from its checkpoint."""
    return sum(survived(number) for number in range(count))


def survived(number: int) -> bool:
    import distributed

    from potluck.fleet.script import read_script
    from potluck.fleet.sealed import KeyPair
    from potluck.sweep.dask_trials import DaskSweep
    from potluck.sweep.spec import SweepWork, TrialResult, trials_of

    os.environ |= {"POTLUCK_DEVICE": "paced:0.001", "PYTHONPATH": str(ROOT / "src")}
    wait = random.Random(number)
    with (
        tempfile.TemporaryDirectory(prefix="sweep-") as made,
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster) as client,
    ):
        folder, keys = Path(made), KeyPair()
        (folder / "train.py").write_text(SCRIPT)
        script = read_script(folder / "train.py")
        work = SweepWork(
            names=script.names,
            contents=script.contents,
            arguments=("--steps", "60"),
            checkpoint_every=3,
            storage=str(folder / "storage"),
            public=keys.public,
        )
        sweep = DaskSweep(client, work, trials_of({"lr": (0.01, 0.02)}, None), keys, logs=folder)
        results: list[TrialResult] = []
        running = threading.Thread(target=lambda: results.extend(sweep.run()))
        running.start()
        victim = f"trial-{1 + number % 2}"
        while running.is_alive() and not sweep.news(victim).checkpoint:
            time.sleep(0.02)
        time.sleep(wait.uniform(0.0, 2.0))
        killed = sweep.hosts().get(victim)
        if killed is not None:
            with contextlib.suppress(KeyError):
                address = sweep.fleet.workers()[killed]
                os.kill(client.run(os.getpid, workers=[address])[address], 9)
        running.join()
        again = next((r for r in results if r.trial == victim), None)
        good = sorted(r.trial for r in results) == ["trial-1", "trial-2"] and all(
            not r.error and r.steps == 60 for r in results
        )
        moved = again is not None and len(again.machines) > 1
        print(f"  {number}: {'good' if good else results}{', moved' if moved else ', ended before'}", flush=True)
        return good


if __name__ == "__main__":
    main()
