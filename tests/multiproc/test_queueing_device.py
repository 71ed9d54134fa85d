"""A host whose device queues its work: a step begins while the last one is computed, and nothing is told early."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import job, queueing
from support.fleet import JOB, Fleet
from support.processes import SOURCE

STEPS, BATCH, CLIP = 8, 32, 0.5
WRAPPER = """
from support import queueing
queueing.install()
from potluck.cli import main
main()
"""


@pytest.mark.alone  # a guest that other tests hold up for seconds when it joins sits out for longer than this lasts
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_steps_that_overlap_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    wrapper, out = tmp_path / "with_queued_device.py", tmp_path / "weights.safetensors"
    wrapper.write_text(WRAPPER)
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[1])])
    with Fleet(tmp_path / "fleet") as fleet:
        words = ["--steps", STEPS, "--batch", BATCH, "--clip", CLIP, "--out", out]
        options = ["--wait-for", "1", "--codec", "none", "--device", queueing.NAME, "--micro-batch", "4"]
        where = ["--bind", "127.0.0.1", "--runs", str(fleet.runs), "--name", "host", "--view", "plain"]
        command = [sys.executable, str(wrapper), "host", str(JOB), *where, *options, "--", *map(str, words)]
        host = fleet.start(command, name="host", env={"PYTHONPATH": path})
        fleet.wait_for(host, lambda: any(fleet.runs.glob("*/token")), "a token", deadline_s=60)
        guest = fleet.guest("ann", "--device", "paced:0.02", "--micro-batch", "2")
        host.succeeds(deadline_s=90)
        guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
        assert len(fleet.steps_with("ann")) >= 2
        (end,) = fleet.events("run_end")
        assert (end["step"], end["loss"]) == (STEPS, fleet.steps()[-1]["loss"])
        assert [event["step"] for event in fleet.steps()] == list(range(1, STEPS + 1))
        losses = [event["loss"] for event in fleet.steps()]
    expected, expected_losses = job.trained_by_hand(STEPS, BATCH, CLIP)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    found = load_file(out)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() / tensor.norm() < 1e-5, name
