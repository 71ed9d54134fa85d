"""A host's script that leaves its loop by `break` and keeps the loop open: it ends cleanly, and all is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

STEPS = 12
SCRIPT = f"""
import torch
from torch.utils.data import DataLoader

import potluck

run = potluck.start()
model = torch.nn.Linear(4, 1).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = iter(run.steps(model, optimizer, DataLoader(torch.ones(640, 4), batch_size=16, shuffle=True)))
for step in steps:
    for batch in step:
        step.backward(model(batch).mean())
    if run.is_host and step.number == {STEPS}:
        break
print("the rest of the script")  # `steps` is still open here
"""


@pytest.mark.parametrize("guests", [0, 1])
def test_a_loop_left_by_break_with_its_iterator_open_is_saved_and_ends(guests: int, tmp_path: Path) -> None:
    job = tmp_path / "left.py"
    job.write_text(SCRIPT)
    device = ["--device", "paced:0.005", "--micro-batch", "4"]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(job, "--wait-for", str(guests), "--checkpoint-every", "0", *device)
        helping = [fleet.guest(f"guest{number}", *device) for number in range(guests)]
        assert "the rest of the script" in host.succeeds(deadline_s=40)
        for guest in helping:
            assert "the rest of the script" not in guest.succeeds(deadline_s=20)
        fleet.assert_nothing_left()
        (end,) = fleet.events("run_end")
        assert (end["reason"], end["step"]) == ("finished", STEPS)
        assert [event["step"] for event in fleet.events("checkpoint")] == [STEPS]
        assert fleet.step_reached() == STEPS
