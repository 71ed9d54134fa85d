"""Two ranks as one CUDA host: on one GPU both use it (`--device cuda:0`) with gloo, on two there is NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import job
from support.fleet import JOB, Fleet

STEPS, BATCH = 12, 32


@pytest.mark.timeout(200)
def test_two_ranks_on_one_gpu_and_a_guest(tmp_path: Path) -> None:
    """The device queues its work, so rounds are in flight on both ranks."""
    options = ["--wait-for", "1", "--codec", "none", "--micro-batch", "2", "--device", "cuda:0"]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(JOB, *options, arguments=["--steps", STEPS, "--batch", BATCH], ranks=2)
        ann = fleet.guest("ann", "--device", "cpu")
        host.succeeds(deadline_s=150)
        ann.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
        assert fleet.steps()[0]["machines"][0]["device"].startswith("2 × ")
        _, losses = job.trained_by_hand(STEPS, BATCH, 0.5)
        assert [e["loss"] for e in fleet.steps()] == pytest.approx(losses, rel=1e-3)


@pytest.mark.timeout(200)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs")
def test_two_gpus_with_nccl(tmp_path: Path) -> None:
    words = ["--depth", "4", "--sequence", "128", "--batch-tokens", "16384", "--steps", "60", "--set", "compile=no"]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host("gpt", "--device", "cuda", *words, ranks=2)
        host.succeeds(deadline_s=150)
        fleet.assert_every_step_is_full(global_batch=128, steps=60)
        assert fleet.steps()[-1]["loss"] < 0.8 * fleet.steps()[0]["loss"]
