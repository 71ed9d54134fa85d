"""Where the data set lies: guests that have it read it themselves, and nothing of it travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import job
from support.fleet import JOB, Fleet

STEPS, BATCH = 20, 32
DEVICE = ["--device", "paced:0.02", "--micro-batch", "4"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_guests_read_their_own_data(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with Fleet(tmp_path / "fleet") as fleet:
        words = ["--data", "local", "--marks", marks, "--steps", STEPS, "--batch", BATCH]
        host = fleet.host(JOB, "--wait-for", "1", "--codec", "none", *DEVICE, arguments=words)
        guest = fleet.guest("ann", *DEVICE)
        host.succeeds(deadline_s=90)
        guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
        assert len(fleet.steps_with("ann")) > STEPS / 2
        losses = [e["loss"] for e in fleet.steps()]
        down = [e["bytes_down"] for e in fleet.steps() if e["samples"].get("ann") and not e["taken_back"]]
        parameters = fleet.events("run_start")[0]["trained_parameters"]
    assert {p.name for p in marks.iterdir()} == {"host", "guest"}
    # Its samples are the right ones.
    assert losses == pytest.approx(job.trained_by_hand(STEPS, BATCH, clip=0.5)[1], rel=1e-4)
    # The weights' change, uncoded, and the numbers of the samples: the samples themselves have 136 bytes each.
    assert 4 * parameters <= sorted(down)[len(down) // 2] <= 4 * parameters + 8 * BATCH
