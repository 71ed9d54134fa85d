"""Whole runs with a CUDA host: guests on the CPU, on a fake device and on the GPU, and the same loss as alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import tokens_job
from support.fleet import JOB, Fleet
from support.processes import SOURCE

STEPS, BATCH = 12, 32
HOST = ("--wait-for", "1", "--micro-batch", "4")
PACED = ("--device", "paced:0.05@cuda")
FAKE = """
from support import fake_device
fake_device.install()
from potluck.cli import main
main()
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("guest", ["cpu", "cuda", "fake"])
def test_a_guest_of_another_kind_contributes(tmp_path: Path, guest: str) -> None:
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(JOB, *HOST, *PACED, arguments=["--steps", STEPS, "--batch", BATCH])
        if guest == "fake":
            wrapper = tmp_path / "with_fake_device.py"
            wrapper.write_text(FAKE)
            path = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(wrapper), *fleet.join_words("ann", "--device", "fake")]
            ann = fleet.start(command, name="ann", env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""})
        else:
            ann = fleet.guest("ann", "--device", guest)
        host.succeeds(deadline_s=100)
        ann.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
        assert fleet.events("guest_joined", "ann")[0]["parity"] > 0.999
        assert len(fleet.steps_with("ann")) > STEPS / 2
        assert fleet.steps()[-1]["loss"] < fleet.steps()[0]["loss"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("replica", ["host", "device"])
def test_a_host_at_full_speed_with_two_guests(tmp_path: Path, replica: str) -> None:
    """The recipe in bf16, micro-batches queued ahead, the replica compared by hash every few steps."""
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\nreplica = "{replica}"\ncheck_replica_every = 3\n')
    words = ["--depth", "6", "--sequence", "512", "--batch-tokens", "524288", "--steps", "80"]
    words += ["--micro-batch", "64", "--set", "compile=no"]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host("gpt", "--config", str(config), "--wait-for", "2", "--device", "cuda", *words)
        guests = [fleet.guest(name, "--device", "cuda", "--micro-batch", "16") for name in ("ann", "bob")]
        host.succeeds(deadline_s=120)
        for guest in guests:
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=1024, steps=80)
        joined = fleet.events("guest_joined")
        assert len(joined) == 2
        assert all(event["parity"] > 0.98 for event in joined)
        # Three processes share the GPU: a guest may sit out while the others fill it, but not all the time.
        assert len(fleet.steps_with("ann")) + len(fleet.steps_with("bob")) > 10
        assert not fleet.events("replica_mismatch")
        assert fleet.steps()[-1]["mfu"] is None or fleet.steps()[-1]["mfu"] > 0
        assert fleet.steps()[-1]["loss"] < 0.8 * fleet.steps()[0]["loss"]


@pytest.mark.timeout(150)
def test_a_mean_over_tokens_on_a_gpu_and_a_cpu_is_that_of_one_process(tmp_path: Path) -> None:
    out, until = tmp_path / "weights.safetensors", tmp_path / "enough"
    words = ["--until", until, "--out", out]
    with Fleet(tmp_path) as fleet:
        job = Path(tokens_job.__file__)
        host = fleet.host(job, "--codec", "none", *HOST, *PACED, arguments=words)
        ann = fleet.guest("ann", "--device", "cpu", "--micro-batch", "3")
        fleet.wait_for(host, lambda: len(fleet.steps_with("ann")) >= 10, "samples of ann")
        until.touch()
        host.succeeds(deadline_s=60)
        ann.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=tokens_job.BATCH)
        losses = [e["loss"] for e in fleet.steps()]
    expected, expected_losses = tokens_job.trained_by_hand(len(losses))
    assert losses == pytest.approx(expected_losses, rel=1e-4)  # two kinds of devices round unalike
    found = load_file(out)
    for name, tensor in expected.items():
        difference = (found[name] - tensor).norm() / tensor.norm()
        assert difference < 1e-4, f"{name} differs by {difference:.2e}"
