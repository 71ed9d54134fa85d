"""Several ranks as one host: torchrun on this machine, gloo in NCCL's place, and a guest at rank 0's table."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import potluck
from potluck.fleet.ranks import free_port, rank_environment
from support import job
from support.fleet import JOB, Fleet, descendants, still_running
from support.processes import SOURCE, Processes, TestProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
BATCH = 32
DEVICE = ("--device", "paced:0.02", "--micro-batch", "3")


def test_two_ranks_and_a_guest_are_one_machine_and_go_on_after_ctrl_c(tmp_path: Path) -> None:
    options = ["--codec", "none", "--checkpoint-every", "2", *DEVICE]
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "1", *options, arguments=["--batch", BATCH], ranks=2)
        guest = fleet.guest("ann", *DEVICE)
        fleet.wait_for(host, lambda: len(fleet.steps_with("ann")) >= 3, "samples of the guest", deadline_s=90)
        below = descendants(host)
        assert len([p for p in below if "python" in p.name()]) == 2, below  # others keep the machine awake
        host.interrupt()
        host.wait(deadline_s=20)
        guest.succeeds(deadline_s=20)
        assert not still_running(below, within_s=2)
        assert f"--resume {shlex.quote(str(fleet.folder))}" in host.stderr()
        assert len([line for line in host.stdout().splitlines() if line.startswith("step 1 ")]) == 1
        (end,) = fleet.events("run_end")
        reached = fleet.step_reached()
        assert (end["reason"], end["step"]) == ("interrupted", reached)
        assert_as_by_hand(fleet, reached)

        goes_on = fleet.host(JOB, "--resume", str(fleet.folder), *options, arguments=["--batch", BATCH], ranks=2)
        fleet.wait_for_step(goes_on, reached + 3, deadline_s=90)
        below = descendants(goes_on)
        assert len(below) == 2, below
        rank_1 = max(below, key=lambda p: (p.create_time(), p.pid))  # torchrun starts them in their order
        rank_1.kill()
        killed = time.monotonic()
        assert goes_on.wait(deadline_s=20) != 0
        assert time.monotonic() - killed < 15
        assert not still_running(below, within_s=2)
        assert "error: rank 1 of this host is gone" in goes_on.stderr()
        assert fleet.events("run_start")[-1]["resumed_from"] == reached
        fleet.assert_every_step_is_full(global_batch=BATCH)
        last = fleet.events("checkpoint")[-1]["step"]
        assert last > reached, "nothing was saved after the run went on"
        assert_as_by_hand(fleet, last)


def assert_as_by_hand(fleet: Fleet, saved: int) -> None:
    """The checkpoint of this step and all losses are those of a plain loop on one machine."""
    fleet.assert_every_step_is_full(global_batch=BATCH)
    expected, losses = job.trained_by_hand(fleet.step_reached(), BATCH, 0.5)
    assert [e["loss"] for e in fleet.steps()] == pytest.approx(losses, rel=1e-4)
    if saved != fleet.step_reached():
        expected, _ = job.trained_by_hand(saved, BATCH, 0.5)
    found = load_file(fleet.folder / "checkpoints" / f"step-{saved:08d}" / "weights-000.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).norm() / tensor.norm()
        assert difference < 1e-5, f"{name} differs by {difference:.2e}"


SCRIPT = """
import copy, os, sys
import torch
import torch.distributed as dist
from torch import nn
import potluck

from potluck.device.pick import FACTORIES
from potluck.device.cpu import CpuDevice

class Queued(CpuDevice):
    ahead = 1  # as a GPU: rounds are in flight

FACTORIES["queued"] = lambda argument: Queued()
SAMPLES, BATCH = 24, 6
run = potluck.start()
expected_role = {"1": "rank", "0": "alone"}[os.environ["RANK"]]
assert run.role == expected_role and run.is_host == (expected_role == "alone"), run.role
assert dist.is_initialized()
torch.manual_seed(os.getpid())  # every rank builds another model: rank 0's is meant

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        out = self.always(x)
        return out + self.rarely(x) if x[0, 0] == 0 else out

points = torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / SAMPLES  # the first alone begins with 0

def items_of(x):
    return (round(8 * x[0, 0].item()) + 1) % 3  # by its number in the data set: 1, 2, 0, …

model = Net()
before = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
losses = []
for step in run.steps(model, optimizer, points, global_batch=BATCH, micro_batch=1, clip_norm=1.0, seed=5):
    for x in step:
        step.backward((model(x) - 1).square().mean(), items=items_of(x))
    losses.append(step.loss)
    if step.index == 4 and not ("--stay" in sys.argv and run.is_host):
        break
print("after the loop:", run.role)

from potluck.train.data import epoch_order
order = [i for epoch in range(2) for i in epoch_order(SAMPLES, 5)(epoch)]
again = torch.optim.AdamW(before.parameters(), lr=0.01, weight_decay=0.5)
for number, loss in enumerate(losses):
    again.zero_grad()
    chosen = order[number * BATCH : (number + 1) * BATCH]
    items = [items_of(points[i : i + 1]) for i in chosen]
    total = sum(n * (before(points[i : i + 1]) - 1).square().mean() for n, i in zip(items, chosen)) / sum(items)
    total.backward()
    nn.utils.clip_grad_norm_(before.parameters(), 1.0)
    again.step()
    assert abs(total.item() - loss) < 1e-5, (number, total.item(), loss)
assert len(losses) == 5
assert 0 in order[: 5 * BATCH]
assert model.never.weight.grad is None
for (name, mine), theirs in zip(model.named_parameters(), before.parameters()):
    assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name
print("as by hand")
"""


def start_ranks(processes: Processes, script: Path, *arguments: str, world: int) -> list[TestProcess]:
    """A user's script as torchrun starts it, without potluck's command line."""
    port = free_port()
    return [
        processes.python(
            str(script),
            *arguments,
            name=f"rank-{rank}",
            env={**rank_environment(rank, world, "127.0.0.1", port), "POTLUCK_DEVICE": "queued"},
        )
        for rank in range(world)
    ]


def test_a_plain_script_under_torchrun_and_one_that_leaves_the_loop(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Processes(tmp_path) as processes:
        zero, one = start_ranks(processes, script, world=2)
        assert "as by hand" in zero.succeeds(deadline_s=90)
        assert "after the loop" not in one.succeeds(deadline_s=20)


def test_one_process_under_torchrun_is_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_environment(0, 1, "127.0.0.1", free_port()).items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    try:
        run = potluck.start()
    finally:
        torch.set_num_threads(threads)
    assert run.role == "alone"
    assert not dist.is_initialized()
    model = nn.Linear(2, 1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in run.steps(model, optimizer, torch.ones(8, 2), global_batch=4, micro_batch=2, steps=3):
        for x in step:
            step.backward(model(x).square().mean())
        losses.append(step.loss)
    assert len(losses) == 3
    assert losses[2] < losses[0]


STOPPED = """
import sys, threading
from pathlib import Path
import torch
from torch import nn
from potluck.spec.config import RunConfig
from potluck.train.event_log import EventLog
from potluck.train.folder import new_folder
from potluck.train.context import ALONE, RANK, RunContext
from potluck.train.ending import Interrupted
from potluck.train.host_ranks import RankDone
from potluck.train.run import Run
from potluck.train.session import device_here
from support import queueing

queueing.install()
device, ranks = device_here(queueing.NAME, 1)
folder = new_folder(Path(sys.argv[1]), "x") if ranks.place.leads else None
log = EventLog(folder.events if folder else None)
role = ALONE if ranks.place.leads else RANK
context = RunContext(
    role=role, config=RunConfig(), device=device, name="host", log=log, folder=folder, ranks=ranks
)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
try:
    for step in Run(context).steps(model, optimizer, torch.randn(64, 4), global_batch=8, micro_batch=1, steps=4):
        for number, x in enumerate(step):
            if step.index == 2 and number == 1:
                context.loop.request_stop()
            step.backward(model(x).square().mean())
except Interrupted:
    context.loop.end("interrupted")
    print("saved", *(path.name for path in folder.checkpoints.iterdir()))
except RankDone:
    pass
"""


def test_ranks_whose_devices_queue_are_stopped_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[1])])
    with Processes(tmp_path) as processes:
        port = free_port()
        zero, one = [
            processes.python(
                str(script),
                str(tmp_path / "runs"),
                name=f"rank-{rank}",
                env={**rank_environment(rank, 2, "127.0.0.1", port), "PYTHONPATH": path},
            )
            for rank in range(2)
        ]
        assert "saved step-00000002" in zero.succeeds(deadline_s=90)
        one.succeeds(deadline_s=20)
