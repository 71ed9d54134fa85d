"""A Ray cluster of three machines with shaped links: guests come and go with its nodes, and no secret is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ray_cluster import DESK, JOB, LAPTOP, MAC, WHY_NOT, LabCluster, assert_no_secret, lab_cluster

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
MACHINES = (
    {"name": DESK, "role": "host"},
    {"name": MAC, "role": "guest", "link_mbit": 200},
    {"name": LAPTOP, "role": "guest", "link_mbit": 100},
)
GONE_S = 30.0
"""On a busy machine; bench/ray_cluster.py has the bar of 10 s."""

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


@pytest.mark.timeout(1200)  # of a busy machine: each process imports torch or Ray
def test_a_cluster_of_three_machines(tmp_path: Path) -> None:
    """One cluster for all of it: starting one costs more than what is tested."""
    with lab_cluster(tmp_path, *MACHINES, dashboard=True) as cluster:
        nodes_come_and_go(cluster)
        a_killed_driver_leaves_nothing(cluster)
        the_host_is_this_machine_or_a_node(cluster)
        ray_train_runs_stock_ddp_with_our_backend(cluster)


def nodes_come_and_go(cluster: LabCluster) -> None:
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
    cluster.wait(lambda: not cluster.ours(), GONE_S)


def a_killed_driver_leaves_nothing(cluster: LabCluster) -> None:
    cluster.start_job()
    cluster.wait(lambda: cluster.joined(MAC))
    cluster.kill_driver()
    cluster.wait(lambda: not cluster.ours(), GONE_S)


def the_host_is_this_machine_or_a_node(cluster: LabCluster) -> None:
    """`potluck up`: the host here, on a node by its name, and by a label; the other nodes are guests."""
    for where, host, guest in (
        (["ray://auto", "--name", "here-1"], "here-1", MAC),
        (["--fleet", "ray", "--host", MAC], MAC, DESK),
        ([f"ray://{cluster.nodes.address}", "--host", "kind=mac", "--name", "there"], "there", DESK),
    ):
        steps = ["--until", str(cluster.folder / "stop"), "--batch", "60", "--width", "64"]
        cluster.start_up(*where, "--device", "paced:0.01", "--", str(JOB), *steps)
        cluster.wait(lambda guest=guest: cluster.joined(guest))
        assert cluster.events("run_start")[0]["machine"] == host
        (cluster.folder / "stop").touch()
        assert cluster.driver is not None
        assert cluster.driver.wait(100) == 0, cluster.told()
        assert "loss" in cluster.job_log.read_text()  # the host's lines are shown
        cluster.driver = None
        cluster.wait(lambda: not cluster.ours(), GONE_S)


def ray_train_runs_stock_ddp_with_our_backend(cluster: LabCluster) -> None:
    trainer = cluster.python(TRAINER, cluster.nodes.address, str(cluster.folder), "desk", "mac")
    trainer.wait(400)
    assert trainer.returncode == 0, cluster.log.read_text()[-3000:]
    where = {(cluster.folder / f"rank-{rank}").read_text() for rank in (0, 1)}
    assert where == {cluster.box.address(DESK), cluster.box.address(MAC)}
