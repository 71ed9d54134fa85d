"""The mathematics is that of one machine: a host with three guests against a plain PyTorch loop, same samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from support import job
from support.fleet import JOB, Fleet

STEPS, BATCH, CLIP = 20, 32, 0.5
GUESTS = {"ann": 1, "bob": 3, "cai": 5}
"""Their micro-batch sizes; the host's is 4."""


def order_of(epoch: int) -> list[int]:
    """As the docs promise it: a permutation from the seed (0) and the epoch's number."""
    return list(np.random.Generator(np.random.PCG64([0, epoch])).permutation(job.SAMPLES))


def trained_by_hand() -> tuple[dict[str, Tensor], list[float]]:
    """The same training without a line of potluck: whole batches, torch's own update; and each step's loss."""
    data, model = job.Data(), job.build(256)
    optimizer = job.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    samples = [index for epoch in range(2) for index in order_of(epoch)]
    losses = []
    for step in range(STEPS):
        chosen = samples[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.points[chosen]), data.labels[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_three_guests_with_their_own_micro_batches_change_nothing(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    options = ["--wait-for", "3", "--codec", "none", "--device", "paced:0.03", "--micro-batch", "4"]
    with Fleet(tmp_path) as fleet:
        words = ["--steps", STEPS, "--batch", BATCH, "--clip", CLIP, "--out", out]
        host = fleet.host(JOB, *options, arguments=words)
        guests = [
            fleet.guest(name, "--device", "paced:0.03", "--micro-batch", str(size)) for name, size in GUESTS.items()
        ]
        host.succeeds(deadline_s=120)
        for guest in guests:
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
        for name in GUESTS:
            assert len(fleet.steps_with(name)) > STEPS / 2, f"{name} contributed only to {fleet.steps_with(name)}"
        fleet.assert_nothing_left()
        losses = [e["loss"] for e in fleet.steps()]

    expected, expected_losses = trained_by_hand()
    found = load_file(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).norm() / tensor.norm()
        assert difference < 1e-5, f"{name} differs by {difference:.2e}"
    assert losses == pytest.approx(expected_losses, rel=1e-4)
