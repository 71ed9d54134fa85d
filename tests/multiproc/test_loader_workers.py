"""A DataLoader's worker processes in a whole run: equal to a plain loop, with guests, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import loader_job
from support.fleet import Fleet, descendants, still_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

JOB = Path(loader_job.__file__)
EPOCHS = 8
PER_EPOCH = -(-loader_job.SAMPLES // loader_job.BATCH)
DEVICE = ["--device", "paced:0.01", "--micro-batch", "4"]
INTERRUPTED = 130
WIDE = 70_000
"""Values of a sample that is worth sending ahead of its lease: 280 kB."""


def test_ctrl_c_ends_the_workers_and_a_resumed_run_equals_a_plain_loop(tmp_path: Path) -> None:
    marks, out = tmp_path / "marks", tmp_path / "weights"
    marks.mkdir()
    words = ["--epochs", EPOCHS, "--marks", marks, "--out", out, "--wide", WIDE]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(JOB, "--wait-for", "1", "--codec", "none", *DEVICE, arguments=words)
        guest = fleet.guest("ann", *DEVICE)
        fleet.wait_for(
            host, lambda: fleet.steps_with("ann") and fleet.step_reached() > PER_EPOCH, "a guest's samples"
        )
        fleet.wait_for(host, lambda: sum(e.get("ahead", 0) for e in fleet.steps()), "samples sent ahead")
        below = descendants(host)
        assert len(below) == 2
        host.interrupt()
        host.exits_with(INTERRUPTED, deadline_s=15)
        assert not still_running(below, within_s=2)
        assert "Traceback" not in host.stderr()
        reached = fleet.step_reached()
        assert 0 < reached < EPOCHS * PER_EPOCH
        guest.succeeds(deadline_s=20)

        words_again = ["--resume", str(fleet.folder), "--codec", "none", *DEVICE]
        fleet.host(JOB, *words_again, arguments=words).succeeds(deadline_s=60)
        fleet.assert_nothing_left()
        steps = fleet.steps()
        assert fleet.events("run_start")[-1]["resumed_from"] == reached
        assert fleet.events("run_start")[0]["steps"] == EPOCHS * PER_EPOCH
    weights, losses = loader_job.trained_by_hand(EPOCHS)
    assert [e["step"] for e in steps] == list(range(1, len(losses) + 1))
    assert [sum(e["samples"].values()) for e in steps] == ([16] * 4 + [8]) * EPOCHS
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-5)
    got = load_file(out)
    assert all(torch.allclose(got[name], weights[name], atol=1e-6) for name in weights)
    # Only worker processes read, and none on the guest: it was sent its samples.
    assert {mark.name.split("-")[0] for mark in marks.iterdir()} == {"host"}


@pytest.mark.parametrize("kind", ["grouped", "stream"])
def test_other_loaders_with_guests_that_are_killed_and_a_host_that_is_resumed(kind: str, tmp_path: Path) -> None:
    out, marks = tmp_path / "weights", tmp_path / "marks"
    marks.mkdir()
    words = ["--epochs", EPOCHS, "--kind", kind, "--marks", marks, "--out", out]
    expected, losses = loader_job.trained_by_hand(EPOCHS, kind=kind)
    sizes = [len(batch) for epoch in range(EPOCHS) for batch in epoch_of(epoch)] if kind == "grouped" else None
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(JOB, "--wait-for", "1", "--codec", "none", *DEVICE, arguments=words)
        ann = fleet.guest("ann", *DEVICE)
        fleet.wait_for(host, lambda: fleet.steps_with("ann"), "samples of ann")
        ann.kill()
        at = fleet.step_reached()
        fleet.wait_for(host, lambda: fleet.step_reached() > at + 2, "steps after that")
        host.interrupt()
        host.exits_with(INTERRUPTED, deadline_s=15)
        reached = fleet.step_reached()
        assert 0 < reached < len(losses)

        again = fleet.host(
            JOB, "--resume", str(fleet.folder), "--wait-for", "1", "--codec", "none", *DEVICE, arguments=words
        )
        bob = fleet.guest("bob", *DEVICE)
        again.succeeds(deadline_s=60)
        bob.succeeds(deadline_s=20)
        steps = fleet.steps()
        assert fleet.events("run_start")[-1]["resumed_from"] == reached
        told = [e["text"] for e in fleet.events("note") if "the stream has no state_dict()" in e["text"]]
        read_again = kind == "stream" and reached % (len(losses) // EPOCHS) > 0
        assert told or not read_again
        assert len(told) <= (kind == "stream"), "at an epoch's end there may be nothing to read again"
    assert [e["step"] for e in steps] == list(range(1, len(losses) + 1))
    assert sizes is None or [sum(e["samples"].values()) for e in steps] == sizes
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-5)
    got = load_file(out)
    assert all(torch.allclose(got[name], tensor, atol=1e-6) for name, tensor in expected.items())
    if kind == "grouped":  # which has a collate function of its own
        by = {role: [mark.name for mark in marks.glob(f"{role}-*")] for role in ("host", "guest")}
        both = {e["step"] - 1 for e in steps if len(e["samples"]) > 1}
        collated = {int(name.split("-")[2]) for name in by["host"] if "-worker-" in name}
        assert len(collated) > len(steps) / 2, "the host's workers collate what it computes"
        assert collated & both, "in a step with a guest, too"
        assert any("-itself-" in name for name in by["guest"]), "and its thread what guests are lent"


def epoch_of(epoch: int) -> list[list[int]]:
    sampler = loader_job.Grouped()
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_guest_with_its_own_data_reads_it_with_workers_and_a_failing_script_leaves_none(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    words = ["--epochs", EPOCHS, "--marks", marks, "--data", "local", "--fails-at", 3 * PER_EPOCH]
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(JOB, "--wait-for", "1", "--codec", "none", *DEVICE, arguments=words)
        guest = fleet.guest("ann", *DEVICE)
        below = fleet.wait_for(host, lambda: fleet.steps_with("ann") and descendants(host), "worker processes")
        own = descendants(guest)
        assert len(own) == 2
        assert host.wait(deadline_s=30) != 0
        assert not still_running([*below, *own], within_s=3)
        losses = [e["loss"] for e in fleet.steps()]
        assert fleet.steps_with("ann")
        readers = {int(mark.name.split("-")[1]) for mark in marks.iterdir() if mark.name.startswith("guest")}
        assert readers == {process.pid for process in own}
    assert losses == pytest.approx(loader_job.trained_by_hand(4)[1][: len(losses)], rel=1e-4)
