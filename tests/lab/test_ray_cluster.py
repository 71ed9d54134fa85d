"""A Ray cluster of three machines with shaped links: guests come and go with its nodes, and no secret is seen."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from potluck.lab.namespaces import NamespaceBox
from potluck.lab.permission import why_not
from support import ray_nodes
from support.ray_nodes import RayNodes
from support.rigs import rig

WHY_NOT = why_not() or ray_nodes.why_not()
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

MARK = uuid.uuid4().hex[:6]
DESK, MAC, LAPTOP = f"desk-{MARK}", f"mac-{MARK}", f"laptop-{MARK}"
JOB = Path(ray_nodes.__file__).with_name("job.py")

DRIVER = """
import sys, time
import potluck.ray
address, script, runs, *arguments = sys.argv[1:]
fleet = potluck.ray.Fleet(address=address)
with fleet.start(script, arguments, runs=runs, options=["--threads", "1"]) as run:
    kinds = [type(event).__name__ for event in run.events()]
result = run.result()
print("events", len(kinds), "checkpoint", result.checkpoint, "steps", result.summary.step, flush=True)
"""

GCS = """
import sys
import ray
from ray._private import state
from ray._private.worker import global_worker
ray.init(address=sys.argv[1], log_to_driver=False)
kv = global_worker.gcs_client
with open(sys.argv[2], "wb") as out:  # what the dashboard and the state API read
    known = state.state
    out.write(repr((known.actor_table(None), ray.nodes(), known.job_table(), known.workers())).encode())
    for space in (None, b"fun", b"job", b"session", b"dashboard"):
        for key in kv.internal_kv_keys(b"", space):
            out.write(key + (kv.internal_kv_get(key, space) or b""))
"""

TRAINER = """
import sys, torch
import ray
from ray.train import ScalingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer

def loop():
    import os, torch, torch.distributed as dist
    from ray.train.torch import prepare_model
    assert dist.get_backend() == "potluck", dist.get_backend()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1, bias=False))
    x = torch.full((2, 4), float(dist.get_rank() + 1))
    model(x).mean().backward()
    gradient = model.module.weight.grad
    assert torch.allclose(gradient, torch.full((1, 4), 1.5)), gradient
    with open(os.path.join(sys_folder, f"rank-{dist.get_rank()}"), "w") as file:
        file.write(ray.util.get_node_ip_address())

address, sys_folder, *kinds = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
scaling = ScalingConfig(num_workers=2, label_selector=[{"kind": kind} for kind in kinds])
TorchTrainer(
    loop,
    torch_config=TorchConfig(backend="potluck"),
    scaling_config=scaling,
    run_config=RunConfig(storage_path=sys_folder),
).fit()
print("trained", flush=True)
"""


class Cluster:
    """Three machines, two of them with a node of Ray, and drivers on the first."""

    def __init__(self, box: NamespaceBox, nodes: RayNodes, folder: Path) -> None:
        self.box, self.nodes, self.folder = box, nodes, folder
        self.driver: Popen[bytes] | None = None
        self.log = self.job_log = folder / "driver.log"

    def python(self, text: str, *arguments: str) -> Popen[bytes]:
        environment = {**self.nodes.environment, "HOME": str(self.folder)}
        self.log = self.folder / f"driver-{uuid.uuid4().hex[:6]}.log"
        return self.box.start(DESK, [sys.executable, "-c", text, *arguments], env=environment, log=self.log)

    def start_job(self) -> None:
        (self.folder / "stop").unlink(missing_ok=True)
        words = ["--until", str(self.folder / "stop"), "--batch", "300", "--width", "64"]
        self.driver = self.python(DRIVER, self.nodes.address, str(JOB), str(self.folder / "runs"), *words)
        self.job_log = self.log

    @property
    def run(self) -> Path | None:
        return max((self.folder / "runs").glob("2*"), key=lambda path: path.name, default=None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        if self.run is None or not (self.run / "events.jsonl").exists():
            return []
        lines = (self.run / "events.jsonl").read_bytes().split(b"\n")[:-1]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait(self, reached: Callable[[], object], seconds: float = 300.0) -> float:
        began = time.monotonic()
        while not reached():
            late = time.monotonic() - began > seconds
            ended = self.driver is not None and self.driver.poll() is not None
            assert not late, self.told()
            assert not ended, self.told()
            time.sleep(0.1)
        return time.monotonic() - began

    def joined(self, machine: str) -> bool:
        return any(event["machine"] == machine for event in self.events("guest_joined"))

    def told(self) -> str:
        logs = list((self.folder / "runs").rglob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (self.job_log, *logs))

    def ours(self) -> list[str]:
        """Processes of the run: the host, its agent, and all guests."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_guest = "potluck" in words and "join" in words and MARK in " ".join(words)
            if is_guest or str(self.folder / "runs") in words:
                found.append(" ".join(words))
        return found


@pytest.mark.timeout(900)  # of a busy machine: each process imports torch or Ray
def test_a_cluster_of_three_machines(tmp_path: Path) -> None:
    """One cluster for all of it: starting one costs more than what is tested."""
    with three_machines(tmp_path) as cluster:
        nodes_come_and_go(cluster)
        a_killed_driver_leaves_nothing(cluster)
        ray_train_runs_stock_ddp_with_our_backend(cluster)


@contextlib.contextmanager
def three_machines(folder: Path) -> Iterator[Cluster]:
    machines = (
        {"name": DESK, "role": "host"},
        {"name": MAC, "role": "guest", "link_mbit": 200},
        {"name": LAPTOP, "role": "guest", "link_mbit": 100},
    )
    with NamespaceBox(rig(*machines)) as box, RayNodes(box) as nodes:
        nodes.add(DESK, cpus=2, labels={"kind": "desk"})
        nodes.add(MAC, cpus=1, labels={"kind": "mac"}, resources={"apple": 1})
        made = Cluster(box, nodes, folder)
        try:
            yield made
        finally:
            if made.driver is not None and made.driver.poll() is None:
                made.driver.kill()
                made.driver.wait()


def nodes_come_and_go(cluster: Cluster) -> None:
    """Every node is a guest, a new one too, and a lost one costs no restart; the token is seen nowhere."""
    cluster.start_job()
    cluster.wait(lambda: cluster.joined(MAC))
    cluster.nodes.add(LAPTOP, cpus=1, labels={"kind": "laptop"})
    cluster.wait(lambda: cluster.joined(LAPTOP))
    assert not cluster.joined(DESK)  # it hosts
    assert_no_secret(cluster)
    cluster.nodes.raylet(LAPTOP).kill()
    gone = ("guest_lost", "guest_left")
    cluster.wait(lambda: any(e["machine"] == LAPTOP for kind in gone for e in cluster.events(kind)), 60)
    step = cluster.events("step")[-1]["step"]
    cluster.wait(lambda: cluster.events("step")[-1]["step"] > step + 3)
    (cluster.folder / "stop").touch()
    assert cluster.driver is not None
    cluster.driver.wait(200)
    assert cluster.driver.returncode == 0, cluster.told()
    assert "checkpoint" in cluster.job_log.read_text()
    assert len(cluster.events("run_start")) == 1
    assert {sum(e["samples"].values()) for e in cluster.events("step")} == {300}
    taken = [e for e in cluster.events("lease_taken_back") if e["machine"] == LAPTOP]
    steps = [e["step"] for e in taken if e.get("step", 0) >= step - 1]
    assert len(set(steps)) <= 1
    cluster.driver = None
    cluster.wait(lambda: not cluster.ours(), 10)


def assert_no_secret(cluster: Cluster) -> None:
    """The token is in no file of Ray's, in no process's arguments or variables, and not in what the GCS knows."""
    assert cluster.run is not None
    token = (cluster.run / "token").read_text().strip()
    secret = token[-40:].encode()
    assert len(token) > 100
    files = [path for path in cluster.nodes.folder.rglob("*") if path.is_file()]
    assert any("raylet" in path.name for path in files)
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            assert secret not in path.read_bytes(), path
    for path in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        with contextlib.suppress(OSError):
            assert secret not in path.read_bytes(), path
    dump = cluster.folder / "gcs"
    asked = cluster.python(GCS, cluster.nodes.address, str(dump))
    asked.wait(200)
    assert asked.returncode == 0, cluster.log.read_text()
    assert b"NodeActor" in dump.read_bytes()
    assert secret not in dump.read_bytes()


def a_killed_driver_leaves_nothing(cluster: Cluster) -> None:
    cluster.start_job()
    cluster.wait(lambda: len(cluster.events("run_start")) and cluster.joined(MAC))
    assert cluster.ours()
    assert cluster.driver is not None
    cluster.driver.kill()
    cluster.driver.wait()
    cluster.driver = None
    cluster.wait(lambda: not cluster.ours(), 10)


def ray_train_runs_stock_ddp_with_our_backend(cluster: Cluster) -> None:
    trainer = cluster.python(TRAINER, cluster.nodes.address, str(cluster.folder), "desk", "mac")
    trainer.wait(300)
    assert trainer.returncode == 0, cluster.log.read_text()[-3000:]
    where = {(cluster.folder / f"rank-{rank}").read_text() for rank in (0, 1)}
    assert where == {cluster.box.address(DESK), cluster.box.address(MAC)}
