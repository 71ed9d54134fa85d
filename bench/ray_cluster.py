"""Potluck on a Ray cluster: what a lost node costs, what a killed driver leaves, what Ray costs in speed.

    .venv/bin/python bench/ray_cluster.py [--count 20] [--only losses,added,driver,throughput,train] [--json FILE]

losses      {removed node, killed actor, killed raylet} in mid-run, --count in all: steps of that guest's share that
            were taken back, restarts of the run
added       seconds from a node's start to its guest, --count times
driver      kill -9 of the driver, --count times: processes of ours alive after 10 s
throughput  samples/s on home-pair, beside `potluck host` and `join` by hand in the same rig, with paced devices
train       Ray Train's elastic restart beside it: seconds without a step after a worker's node is lost

Each on a cluster of real nodes (`ray start`) in the lab's network namespaces: needs root on Linux and potluck[ray].
Exits with 1 if a bar is missed. Ctrl-C ends a part early; what was done counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import ray_cluster as lab  # noqa: E402

JOINED_S, GONE_S, SPEED = 10.0, 10.0, 0.01
GONE = ("guest_lost", "guest_left")
HOME = ["gpt", "--depth", "4", "--sequence", "128", "--batch-tokens", str(48 * 128), "--steps", "14"]
"""The workload of the rig home-pair, as its settings are spelled on the command line."""
HOST = ["--device", "paced:0.15", "--codec", "int4", "--wait-for", "1", "--threads", "1"]
GUEST_DEVICE = "paced:0.6"
PAIR = ({"name": lab.DESK, "role": "host"}, {"name": lab.MAC, "role": "guest", "link_mbit": 40})
THIRD = {"name": lab.LAPTOP, "role": "guest", "link_mbit": 100}

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
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, ray.util.get_node_ip_address())
    for step in range(100000):
        model(torch.ones(2, 8)).mean().backward()
        if dist.get_rank() == 0:
            with open(config["folder"] + "/elastic", "a") as file:
                file.write(f"{time.time()} {len(set(places))}\\n")
        time.sleep(0.1)

ray.init(address=address, log_to_driver=False)
TorchTrainer(
    loop, train_loop_config={"folder": folder}, torch_config=TorchConfig(backend="potluck"),
    scaling_config=ScalingConfig(num_workers=(1, 2), placement_strategy="SPREAD"),
    run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
).fit()
"""


def of(made: lab.LabCluster, machine: str, *kinds: str) -> list[dict[str, Any]]:
    """Events about a machine. Its name may end with a number: it may come again before its end was noticed."""
    found = [e for kind in kinds for e in made.events(kind) if e["machine"].startswith(machine)]
    return sorted(found, key=lambda e: float(e["t_s"]))


def add_third(made: lab.LabCluster) -> float:
    """Seconds from the moment when Ray says that the third machine's node is up until its guest has joined."""
    before = len(of(made, lab.LAPTOP, "guest_joined"))
    made.nodes.add(lab.LAPTOP, cpus=1)
    seconds = made.wait(lambda: len(of(made, lab.LAPTOP, "guest_joined")) > before)
    print(f"  joined after {seconds:.1f} s", flush=True)
    return seconds


def stopped(made: lab.LabCluster) -> None:
    (made.folder / "stop").touch()
    assert made.driver is not None
    assert made.driver.wait(200) == 0, made.told()


def losses(folder: Path, count: int) -> dict[str, Any]:
    """Lose the third machine's node again and again, in three ways, in one run."""
    lost: list[tuple[int, float]] = []
    with lab.lab_cluster(folder, *PAIR, THIRD) as made:
        made.start_job()
        made.wait(lambda: made.joined(lab.MAC))
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(count):
                lost.append(lose(made, ("node", "actor", "raylet")[number % 3]))
        stopped(made)
        starts = len(made.events("run_start"))
        whole = {sum(e["samples"].values()) for e in made.events("step")} == {300}
    good = sum(steps <= 1 for steps, _ in lost)
    return {
        "losses": len(lost),
        "at most one step of its share": good,
        "longest step at the loss, s": [longest_s for _, longest_s in lost],
        "starts of the run": starts,
        "every step whole": whole,
        "met": good == len(lost) and starts == 1 and whole,
    }


def lose(made: lab.LabCluster, how: str) -> tuple[int, float]:
    """Lose the third machine while it has a share: steps in which samples were taken back, and the longest step."""
    if lab.LAPTOP not in made.nodes.processes:
        add_third(made)
    began = made.events("step")[-1]["step"]
    made.wait(lambda: any(e["step"] > began and shared(e) for e in made.events("step")), 60)
    time.sleep(random.random())
    last = made.events("step")[-1]["step"]
    joined, gone = len(of(made, lab.LAPTOP, "guest_joined")), len(of(made, lab.LAPTOP, *GONE))
    if how == "node":
        made.nodes.remove(lab.LAPTOP)
    elif how == "raylet":
        made.nodes.raylet(lab.LAPTOP).kill()
    else:
        next(p for p in made.nodes.tree(lab.LAPTOP) if "NodeActor" in " ".join(p.cmdline())).kill()
    made.wait(lambda: len(of(made, lab.LAPTOP, *GONE)) > gone)
    end = of(made, lab.LAPTOP, *GONE)[-1]
    if how == "raylet":
        made.nodes.remove(lab.LAPTOP)
    if how == "actor":
        made.wait(lambda: len(of(made, lab.LAPTOP, "guest_joined")) > joined)
    back = [
        e for e in of(made, lab.LAPTOP, "lease_taken_back") if e["step"] > last and e["t_s"] <= end["t_s"] + 0.5
    ]
    steps = {e["step"] for e in back} | ({end["step"]} if end.get("samples_taken_back") else set())
    made.wait(lambda: made.events("step")[-1]["step"] > last + 3)
    longest_s = max(e["step_s"] for e in made.events("step") if e["step"] >= last and e["t_s"] <= end["t_s"] + 3)
    print(f"  {how:6} taken back in steps {sorted(steps)}, longest step {longest_s:.2f} s", flush=True)
    return len(steps), longest_s


def shared(step: dict[str, Any]) -> bool:
    return any(name.startswith(lab.LAPTOP) and samples for name, samples in step["samples"].items())


def added(folder: Path, count: int) -> dict[str, Any]:
    """Add the third machine's node, and remove it again."""
    seconds = []
    with lab.lab_cluster(folder, *PAIR, THIRD) as made:
        made.start_job()
        made.wait(lambda: made.joined(lab.MAC))
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(count):
                seconds.append(add_third(made))
                gone = len(of(made, lab.LAPTOP, *GONE))
                made.nodes.remove(lab.LAPTOP)
                made.wait(lambda gone=gone: len(of(made, lab.LAPTOP, *GONE)) > gone)
        stopped(made)
    return {"nodes": len(seconds), "joined after, s": seconds, "met": max(seconds) <= JOINED_S}


def driver(folder: Path, count: int) -> dict[str, Any]:
    clean, seconds = 0, []
    with lab.lab_cluster(folder, *PAIR) as made, contextlib.suppress(KeyboardInterrupt):
        for _ in range(count):
            made.start_job()
            made.wait(lambda: made.joined(lab.MAC))
            made.kill_driver()
            began = time.monotonic()
            while made.ours() and time.monotonic() - began < GONE_S:
                time.sleep(0.1)
            left = made.ours()
            clean += not left
            seconds.append(time.monotonic() - began)
            print(f"  after {seconds[-1]:.1f} s: {left or 'nothing left'}", flush=True)
            made.wait(lambda: not made.ours(), 60)
    return {
        "kills": len(seconds),
        "nothing left after 10 s": clean,
        "seconds": seconds,
        "met": clean == len(seconds),
    }


def rate(run: Path) -> float:
    """Samples per second of a run's steps, without the first two, in which the shares are found."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in lines if e["event"] == "step"][2:]
    return sum(sum(e["samples"].values()) for e in steps) / sum(e["step_s"] for e in steps)


def throughput(folder: Path, count: int) -> dict[str, Any]:
    """By Ray and by hand in turn, in one rig; paced devices: the box's load counts little."""
    ray_rates, hand_rates = [], []
    with lab.lab_cluster(folder, *PAIR) as made:
        for number in range(max(1, min(3, count))):
            runs = folder / f"ray-{number}"
            started = made.python(FLEET, made.nodes.address, str(runs), GUEST_DEVICE, *HOST, "::", *HOME)
            started.wait(500)
            ray_rates.append(rate(next(runs.glob("2*"))))
            hand_rates.append(by_hand(made, folder / f"hand-{number}"))
    ratio = statistics.mean(ray_rates) / statistics.mean(hand_rates)
    return {"ray": ray_rates, "by hand": hand_rates, "ratio": ratio, "met": ratio >= 1 - SPEED}


def by_hand(made: lab.LabCluster, runs: Path) -> float:
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
    lines = folder / "elastic"

    def steps() -> list[float]:
        return [float(line.split()[0]) for line in lines.read_text().splitlines()] if lines.exists() else []

    def pauses(after: int) -> list[float]:
        return [b - a for a, b in zip(steps()[after - 2 :], steps()[after - 1 :])]

    with lab.lab_cluster(folder, *PAIR) as made:
        made.driver = made.python(ELASTIC, made.nodes.address, str(folder))
        made.job_log = made.log
        made.wait(lambda: len(steps()) > 20, 400)
        assert lines.read_text().split()[-1] == "2", "both workers are on one machine"
        before = len(steps())
        made.nodes.raylet(lab.MAC).kill()
        made.wait(lambda: max(pauses(before)[:-10], default=0.0) > 1, 400)
    return {"seconds without a step": max(pauses(before)), "met": True}


PARTS = {"losses": losses, "added": added, "driver": driver, "throughput": throughput, "train": train}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it every start compiles Potluck again
    if lab.WHY_NOT is not None:
        print(lab.WHY_NOT, file=sys.stderr)
        return 1
    found: dict[str, Any] = {}
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix=f"bench-ray-{name}-", ignore_cleanup_errors=True) as folder:
            found[name] = PARTS[name](Path(folder), options.count)
        print(f"{name:11} {'met' if found[name]['met'] else 'MISSED'}", flush=True)
        for what, value in found[name].items():
            if what != "met":
                shown = " ".join(f"{v:.2f}" for v in value) if isinstance(value, list) else value
                print(f"            {what}: {shown}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(part["met"] for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
