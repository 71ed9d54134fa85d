"""A model whose forward changes buffers: told once; a guest stays where that is harmless, else it is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fleet import Fleet

REFUSED = 3
DEVICE = ["--device", "paced:0.002", "--micro-batch", "4"]
JOB = """
import sys
import torch, potluck
from torch import nn
from torch.nn.functional import mse_loss

class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("embed", torch.randn(8, 2))

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.embed).argmin(1)
        found = self.embed[nearest]
        with torch.no_grad():
            self.embed.index_copy_(0, nearest, 0.5 * found + 0.5 * x)
        return found + x * 0.1 if sys.argv[1] == "used" else x

run = potluck.start()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(3, 2), Codebook(), nn.Linear(2, 3)).to(run.device)
points = torch.randn(4096, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in run.steps(model, optimizer, points, global_batch=32, steps=100):
    for x in step:
        step.backward(mse_loss(model(x), x))
"""


@pytest.mark.parametrize("case", ["used", "recorded"])
def test_a_guest_is_removed_where_the_forward_computes_with_the_buffer_that_it_changes(
    tmp_path: Path, case: str
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(job, "--wait-for", "1", *DEVICE, arguments=[case])
        ann = fleet.guest("ann", *DEVICE)
        host.succeeds(deadline_s=60)
        assert ann.wait(deadline_s=20) == (REFUSED if case == "used" else 0)
        (told,) = [event["text"] for event in fleet.events("note") if "buffers" in event["text"]]
        assert told.startswith("the forward of Codebook changes its buffers (1.embed), and guests compute with")
        gone = [event for kind in ("guest_lost", "guest_refused") for event in fleet.events(kind, "ann")]
        if case == "recorded":
            assert not gone
            assert fleet.steps_with("ann")[-1] > 50
        else:
            assert "(the model changes its buffers 1.embed as it computes)" in gone[0]["reason"]
            assert "hint: the model changes its buffers 1.embed" in ann.stderr()
