"""Samples that travel ahead of their lease, in a whole run: they come early, each counts once, nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import loader_job
from support.fleet import Fleet

EPOCHS = 6
WIDE = 70_000
"""Values of a sample: 280 kB."""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_samples_come_ahead_and_each_counts_once_while_a_guest_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "weights"
    words = ["--epochs", EPOCHS, "--workers", 0, "--wide", WIDE, "--out", out]
    device = ["--device", "paced:0.02", "--micro-batch", "4"]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(Path(loader_job.__file__), "--wait-for", "2", "--codec", "none", *device, arguments=words)
        ann, bob = fleet.guest("ann", *device), fleet.guest("bob", *device)
        fleet.wait_for(
            host,
            lambda: [e for e in fleet.steps() if e.get("ahead") and e["samples"].get("ann")],
            "samples sent ahead",
        )
        ann.kill()
        host.succeeds(deadline_s=60)
        bob.succeeds(deadline_s=20)
        assert [sum(e["samples"].values()) for e in fleet.steps()] == ([16] * 4 + [8]) * EPOCHS
        losses = [e["loss"] for e in fleet.steps()]
        report = fleet.potluck("report", str(fleet.folder), name="report").succeeds(deadline_s=30)
        assert "sent ahead" in report
    weights, expected = loader_job.trained_by_hand(EPOCHS, workers=0)
    assert losses == pytest.approx(expected, rel=1e-5)
    got = load_file(out)
    assert all(torch.allclose(got[name], weights[name], atol=1e-6) for name in weights)
