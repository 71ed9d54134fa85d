"""A guest on a device that is not the CPU: everything is staged, its gradients agree, and they count."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support import fake_device
from support.fleet import JOB, Fleet
from support.processes import SOURCE

STEPS, BATCH = 12, 32
WRAPPER = """
from support import fake_device
fake_device.install()
from potluck.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.skipif(not fake_device.available(), reason="this machine has a real accelerator")
def test_a_guest_on_another_device_contributes(tmp_path: Path) -> None:
    wrapper = tmp_path / "with_fake_device.py"
    wrapper.write_text(WRAPPER)
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[1])])
    with Fleet(tmp_path / "fleet") as fleet:
        words = ["--steps", STEPS, "--batch", BATCH]
        host = fleet.host(JOB, "--wait-for", "1", "--device", "paced:0.05", "--micro-batch", "4", arguments=words)
        command = [sys.executable, str(wrapper), *fleet.join_words("ann", "--device", "fake")]
        guest = fleet.start(command, name="ann", env={"PYTHONPATH": path})
        host.succeeds(deadline_s=90)
        guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
        joined = fleet.events("guest_joined", "ann")[0]
        assert "fake" in joined["device"]
        assert joined["parity"] > 0.999
        assert len(fleet.steps_with("ann")) > STEPS / 2
        assert fleet.steps()[-1]["loss"] < fleet.steps()[0]["loss"]
