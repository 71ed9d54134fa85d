"""Losses that are means over tokens: exact over machines that come and go, whatever the sentences' lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import tokens_job
from support.fleet import Fleet

DEVICE = ("--device", "paced:0.01", "--micro-batch")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_mean_over_tokens_is_that_of_one_process_while_guests_come_and_go(tmp_path: Path) -> None:
    out, until = tmp_path / "weights.safetensors", tmp_path / "enough"
    job = Path(tokens_job.__file__)
    with Fleet(tmp_path) as fleet:
        words = ["--until", until, "--out", out]
        host = fleet.host(job, "--wait-for", "2", "--codec", "none", *DEVICE, "4", arguments=words)
        ann, bob = fleet.guest("ann", *DEVICE, "1"), fleet.guest("bob", *DEVICE, "3")
        cai = fleet.guest("cai", *DEVICE, "5")  # comes when it is up, in the middle of some step
        fleet.wait_for(host, lambda: len(fleet.steps_with("ann")) >= 3, "samples of ann")
        ann.kill()
        for name in ("bob", "cai"):
            fleet.wait_for(host, lambda name=name: len(fleet.steps_with(name)) >= 5, f"samples of {name}")
        until.touch()
        host.succeeds(deadline_s=60)
        for guest in (bob, cai):
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=tokens_job.BATCH)
        losses = [e["loss"] for e in fleet.steps()]

    expected, expected_losses = tokens_job.trained_by_hand(len(losses))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    found = load_file(out)
    for name, tensor in expected.items():
        difference = (found[name] - tensor).norm() / tensor.norm()
        assert difference < 1e-6, f"{name} differs by {difference:.2e}"
