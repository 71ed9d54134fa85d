"""The mathematics is that of one machine: a host with three guests against a plain PyTorch loop, same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import job
from support.fleet import JOB, Fleet

STEPS, BATCH, CLIP = 20, 32, 0.5
GUESTS = {"ann": 1, "bob": 3, "cai": 5}
"""Their micro-batch sizes; the host's is 4."""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_three_guests_with_their_own_micro_batches_change_nothing(tmp_path: Path) -> None:
    out, marks = tmp_path / "weights.safetensors", tmp_path / "marks"
    marks.mkdir()
    options = ["--wait-for", "3", "--codec", "none", "--device", "paced:0.03", "--micro-batch", "4"]
    with Fleet(tmp_path) as fleet:
        words = ["--steps", STEPS, "--batch", BATCH, "--clip", CLIP, "--out", out, "--marks", marks]
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

    assert [p.name for p in marks.iterdir()] == ["host"], "a guest opened the data set, though samples are sent"
    expected, expected_losses = job.trained_by_hand(STEPS, BATCH, CLIP)
    found = load_file(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).norm() / tensor.norm()
        assert difference < 1e-5, f"{name} differs by {difference:.2e}"
    assert losses == pytest.approx(expected_losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_guest_that_comes_in_the_middle_of_a_long_step_computes_a_part_of_it(tmp_path: Path) -> None:
    """Steps of 15 s, the second of which begins before the guest: it is checked and lent samples in it."""
    out, batch = tmp_path / "weights.safetensors", 150
    with Fleet(tmp_path) as fleet:
        paced = ["--device", "paced:0.1", "--micro-batch", "4"]
        words = ["--steps", 2, "--batch", batch, "--clip", CLIP, "--out", out]
        host = fleet.host(JOB, *paced, "--codec", "none", arguments=words)
        fleet.wait_for_step(host, 1)
        guest = fleet.guest("ann", *paced)
        host.succeeds(deadline_s=90)
        guest.succeeds(deadline_s=20)
        assert fleet.steps_with("ann") == [2]
    expected, _ = job.trained_by_hand(2, batch, CLIP)
    found = load_file(out)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() / tensor.norm() < 1e-5, name
