"""Potluck on a Ray cluster: what a lost node costs, what a killed driver leaves, what Ray costs in speed.

    .venv/bin/python bench/ray_cluster.py [--count 20] [--only losses,driver,speed,train,token] [--json FILE]

losses   {removed node, killed actor, killed raylet} in mid-run, --count in all: steps of that guest's share that
         were taken back, restarts of the run, and seconds from a node's start to its guest
driver   kill -9 of the driver, --count times: processes of ours alive after 10 s
speed    samples/s on home-pair, beside `potluck host` and `join` by hand in the same rig, paced devices
train    Ray Train's elastic restart beside it: seconds without a step after a worker is killed
token    the token in Ray's files, in any process, and in the answers of the dashboard's API

Each on a cluster of real nodes (`ray start`) in the lab's network namespaces: needs root on Linux and potluck[ray].
Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "lab")]

import test_ray_cluster as lab  # noqa: E402

from potluck.lab.namespaces import NamespaceBox  # noqa: E402
from support.ray_nodes import RayNodes  # noqa: E402
from support.rigs import rig  # noqa: E402

JOINED_S, GONE_S, SPEED = 10.0, 10.0, 0.01
GONE = ("guest_lost", "guest_left")
HOME = ["gpt", "--depth", "4", "--sequence", "128", "--batch-tokens", str(48 * 128), "--steps", "14"]
"""The workload of the rig home-pair, as its settings are spelled on the command line."""
HOST = ["--device", "paced:0.15", "--codec", "int4", "--wait-for", "1", "--threads", "1"]
GUEST_DEVICE = "paced:0.6"
PAIR = ({"name": lab.DESK, "role": "host"}, {"name": lab.MAC, "role": "guest", "link_mbit": 40})

FLEET = """
import sys, potluck.ray
address, runs, device, *words = sys.argv[1:]
cut = words.index("::")
fleet = potluck.ray.Fleet(address=address, guests={"device": device})
print(fleet.start(words[cut + 1], words[cut + 2:], runs=runs, options=words[:cut]).result().folder, flush=True)
"""

ELASTIC = """
import json, sys, time
import ray, ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
address, folder = sys.argv[1:]

def loop(config):
    import torch, torch.distributed as dist
    from ray.train.torch import prepare_model
    model = prepare_model(torch.nn.Linear(8, 1))
    for step in range(600):
        model(torch.ones(2, 8)).mean().backward()
        if dist.get_rank() == 0:
            with open(config["folder"] + "/elastic", "a") as file:
                file.write(f"{time.time()} {dist.get_world_size()}\\n")
        time.sleep(0.1)

ray.init(address=address, log_to_driver=False)
TorchTrainer(
    loop, train_loop_config={"folder": folder}, torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=(1, 2)),
    run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
).fit()
"""


@contextmanager
def cluster(folder: Path, *machines: dict[str, Any], dashboard: bool = False) -> Iterator[lab.Cluster]:
    """Nodes of Ray on the first two machines."""
    with NamespaceBox(rig(*machines)) as box, RayNodes(box, dashboard=dashboard) as nodes:
        nodes.add(lab.DESK, cpus=2, labels={"kind": "desk"})
        nodes.add(lab.MAC, cpus=1, labels={"kind": "mac"})
        made = lab.Cluster(box, nodes, folder)
        try:
            yield made
        finally:
            if made.driver is not None and made.driver.poll() is None:
                made.driver.kill()
                made.driver.wait()


def of(made: lab.Cluster, machine: str, *kinds: str) -> list[dict[str, Any]]:
    return [e for kind in kinds for e in made.events(kind) if e["machine"] == machine]


def losses(folder: Path, count: int) -> dict[str, Any]:
    """Lose the third machine's node again and again, in three ways, in one run."""
    third = {"name": lab.LAPTOP, "role": "guest", "link_mbit": 100}
    joined, taken = [], []
    with cluster(folder, *PAIR, third) as made:
        made.start_job()
        made.wait(lambda: made.joined(lab.MAC))
        for number in range(count):
            how = ("node", "actor", "raylet")[number % 3]
            before = len(of(made, lab.LAPTOP, "guest_joined"))
            if lab.LAPTOP not in made.nodes.processes:
                made.nodes.add(lab.LAPTOP, cpus=1)
                began = time.monotonic()
                made.wait(lambda before=before: len(of(made, lab.LAPTOP, "guest_joined")) > before)
                joined.append(time.monotonic() - began)
            time.sleep(1 + 2 * random.random())
            back, gone = len(of(made, lab.LAPTOP, "lease_taken_back")), len(of(made, lab.LAPTOP, *GONE))
            if how == "node":
                made.nodes.remove(lab.LAPTOP)
            elif how == "raylet":
                made.nodes.raylet(lab.LAPTOP).kill()
            else:
                actors = [p for p in made.nodes.tree(lab.LAPTOP) if "NodeActor" in " ".join(p.cmdline())]
                actors[0].kill()
            made.wait(lambda gone=gone: len(of(made, lab.LAPTOP, *GONE)) > gone)
            if how == "raylet":
                made.nodes.remove(lab.LAPTOP)
            if how == "actor":
                before = len(of(made, lab.LAPTOP, "guest_joined"))
                made.wait(lambda before=before: len(of(made, lab.LAPTOP, "guest_joined")) > before)
            taken.append(len(of(made, lab.LAPTOP, "lease_taken_back")[back:]))
        (made.folder / "stop").touch()
        assert made.driver is not None
        made.driver.wait(90)
        starts = len(made.events("run_start"))
        whole = {sum(e["samples"].values()) for e in made.events("step")} == {300}
    good = sum(n <= 1 for n in taken)
    return {
        "losses": count,
        "at most one step of its share": good,
        "starts of the run": starts,
        "every step whole": whole,
        "joined_s": joined,
        "met": good == count and starts == 1 and whole and max(joined, default=0.0) <= JOINED_S,
    }


def driver(folder: Path, count: int) -> dict[str, Any]:
    clean, seconds = 0, []
    with cluster(folder, *PAIR) as made:
        for _ in range(count):
            before = len(list((folder / "runs").glob("2*")))
            made.start_job()
            made.wait(lambda before=before: len(list((folder / "runs").glob("2*"))) > before)
            made.wait(lambda: made.joined(lab.MAC))
            assert made.driver is not None
            made.driver.kill()
            made.driver.wait()
            made.driver = None
            began = time.monotonic()
            while made.ours() and time.monotonic() - began < GONE_S:
                time.sleep(0.1)
            clean += not made.ours()
            seconds.append(time.monotonic() - began)
            time.sleep(1.1)  # run folders are named by the second
    return {"kills": count, "nothing left after 10 s": clean, "seconds": seconds, "met": clean == count}


def rate(run: Path) -> float:
    """Samples per second of a run's steps, without the first two, in which the shares are found."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in lines if e["event"] == "step"][2:]
    return sum(sum(e["samples"].values()) for e in steps) / sum(e["step_s"] for e in steps)


def speed(folder: Path, count: int) -> dict[str, Any]:
    """By Ray and by hand in turn, in one rig; paced devices: the box's load counts little."""
    ray_rates, hand_rates = [], []
    with cluster(folder, *PAIR) as made:
        for number in range(max(1, min(3, count))):
            runs = folder / f"ray-{number}"
            started = made.python(FLEET, made.nodes.address, str(runs), GUEST_DEVICE, *HOST, "::", *HOME)
            started.wait(500)
            ray_rates.append(rate(next(runs.glob("2*"))))
            hand_rates.append(by_hand(made, folder / f"hand-{number}"))
    ratio = statistics.mean(ray_rates) / statistics.mean(hand_rates)
    return {"ray": ray_rates, "by hand": hand_rates, "ratio": ratio, "met": ratio >= 1 - SPEED}


def by_hand(made: lab.Cluster, runs: Path) -> float:
    environment, python = made.nodes.environment, [sys.executable, "-m", "potluck"]
    log = made.folder / "by-hand.log"
    words = [*python, "host", "--view", "plain", "--runs", str(runs), *HOST, *HOME]
    host = made.box.start(lab.DESK, words, env=environment, log=log)
    while not list(runs.glob("2*/token")):
        time.sleep(0.1)
    words = [*python, "join", "--token-file", str(next(runs.glob("2*/token"))), "--device", GUEST_DEVICE]
    guest = made.box.start(lab.MAC, [*words, "--threads", "1", "--view", "plain"], env=environment, log=log)
    host.wait(500)
    guest.wait(30)
    return rate(next(runs.glob("2*")))


def train(folder: Path, count: int) -> dict[str, Any]:
    """The longest pause of rank 0 after the other worker's node was lost. No bar: it is Ray's."""
    with cluster(folder, *PAIR) as made:
        trainer = made.python(ELASTIC, made.nodes.address, str(folder))
        lines = folder / "elastic"
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not (lines.exists() and len(lines.read_text().splitlines()) > 20):
            time.sleep(0.2)
        before = len(lines.read_text().splitlines())
        made.nodes.raylet(lab.MAC).kill()
        while time.monotonic() < deadline and len(lines.read_text().splitlines()) < before + 20:
            time.sleep(0.2)
        time.sleep(5)
        times = [float(line.split()[0]) for line in lines.read_text().splitlines()]
        trainer.kill()
    pause_s = max(b - a for a, b in zip(times[before - 2 :], times[before - 1 :]))
    return {"seconds without a step": pause_s, "met": True}


def token(folder: Path, count: int) -> dict[str, Any]:
    with cluster(folder, *PAIR, dashboard=True) as made:
        made.start_job()
        made.wait(lambda: made.joined(lab.MAC))
        lab.assert_no_secret(made)
        assert made.run is not None
        secret = (made.run / "token").read_text().strip()[-40:]
        text = "import sys, urllib.request as u\nfor url in sys.argv[1:]: print(u.urlopen(url).read().decode())"
        host = made.nodes.address.partition(":")[0]
        paths = (
            "/api/v0/actors?detail=true",
            "/api/v0/tasks?detail=true",
            "/nodes?view=summary",
            "/logical/actors",
        )
        asked = made.python(text, *(f"http://{host}:{made.nodes.dashboard_port}{path}" for path in paths))
        asked.wait(60)
        answers = made.log.read_text()
        good = asked.returncode == 0 and "NodeActor" in answers and secret not in answers
    return {"places without the token": "files, processes, GCS, dashboard" if good else "not all", "met": good}


PARTS = {"losses": losses, "driver": driver, "speed": speed, "train": train, "token": token}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if lab.WHY_NOT is not None:
        print(lab.WHY_NOT, file=sys.stderr)
        return 1
    found: dict[str, Any] = {}
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix=f"bench-ray-{name}-", ignore_cleanup_errors=True) as folder:
            found[name] = PARTS[name](Path(folder), options.count)
        print(f"{name:8} {'met' if found[name]['met'] else 'MISSED'}", flush=True)
        for what, value in found[name].items():
            if what != "met":
                shown = " ".join(f"{v:.2f}" for v in value) if isinstance(value, list) else value
                print(f"         {what}: {shown}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(part["met"] for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
