"""Stop and go on: Ctrl-C saves and ends all, a run resumes at exactly the next sample, tokens stay valid."""

from __future__ import annotations

import shlex
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.fleet import JOB, Fleet, descendants, still_running

INTERRUPTED = 130
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_ctrl_c_saves_and_ends_all_processes_and_resume_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    words = ["--depth", "1", "--sequence", "32", "--batch-tokens", "256", "--data", str(text)]
    with Fleet(tmp_path / "a fleet") as fleet:
        train = fleet.train(*words, "--steps", "1000", "--device", "paced:0.02", "--micro-batch", "2", guests=1)
        train.wait_until(lambda: list(fleet.runs.glob("*/events.jsonl")), 60, "run folder")
        fleet.wait_for(train, lambda: fleet.steps_with("guest-1"), "samples of the guest")
        below = descendants(train)
        assert below, "no guest process"
        asked = time.monotonic()
        train.interrupt()
        train.exits_with(INTERRUPTED, deadline_s=10)
        assert time.monotonic() - asked < 10
        assert not still_running(below, within_s=2)
        assert f"--resume {shlex.quote(str(fleet.folder))}" in train.stderr()  # it can be pasted, spaces and all
        fleet.assert_nothing_left()

        reached = fleet.step_reached()
        (end,) = fleet.events("run_end")
        assert (end["reason"], end["step"]) == ("interrupted", reached)
        assert saved_steps(fleet)[-1] == reached

        goes_on = fleet.train("--resume", str(fleet.folder), "--steps", str(reached + 5), guests=1)
        goes_on.succeeds(deadline_s=60)
        assert fleet.events("run_start")[-1]["resumed_from"] == reached
        fleet.assert_every_step_is_full(global_batch=8, steps=reached + 5)
        assert saved_steps(fleet)[-1] == reached + 5


def test_a_host_killed_and_resumed_finds_its_guests_again(tmp_path: Path) -> None:
    until = tmp_path / "enough"
    arguments = ["--batch", 16, "--until", until]
    device = ["--device", "paced:0.03", "--micro-batch", "2"]
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "1", "--checkpoint-every", "3", *device, arguments=arguments)
        token = (fleet.folder / "token").read_text()
        port = fleet.port
        ann = fleet.guest("ann", *device)
        fleet.wait_for(host, lambda: saved_steps(fleet) and fleet.steps_with("ann"), "a checkpoint")
        fleet.wait_for_step(host, fleet.step_reached() + 2)
        host.kill()
        events_before, saved = len(fleet.events()), saved_steps(fleet)[-1]

        host = fleet.host(JOB, "--resume", str(fleet.folder), *device, arguments=arguments)
        assert (fleet.folder / "token").read_text() == token
        assert fleet.port == port
        old_token = tmp_path / "old-token"
        old_token.write_text(token)
        bob = fleet.guest("bob", *device, token=old_token)
        for name, joined in (("ann", 2), ("bob", 1)):
            fleet.wait_for_event(host, "guest_joined", name, count=joined)
        fleet.wait_for_step(host, fleet.step_reached() + 3)
        until.touch()
        host.succeeds(deadline_s=20)
        for guest in (ann, bob):
            guest.succeeds(deadline_s=20)

        after = [e for e in fleet.events()[events_before:] if e["event"] == "step"]
        assert [e["step"] for e in after] == list(range(saved + 1, saved + 1 + len(after)))
        assert {sum(e["samples"].values()) for e in after} == {16}
        assert {name for e in after for name in e["samples"]} == {"host", "ann", "bob"}
        fleet.assert_nothing_left()


def test_a_resumed_run_alone_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path) -> None:
    """With dropout, so that the random numbers must go on where they were, too."""
    options = ["--device", "paced:0.01", "--micro-batch", "4", "--checkpoint-every", "0"]
    outs = {name: tmp_path / f"{name}.safetensors" for name in ("whole", "parted")}
    arguments = ["--steps", 12, "--dropout", 0.2, "--batch", 24]
    with Fleet(tmp_path / "whole") as whole, Fleet(tmp_path / "parted") as parted:
        uninterrupted = whole.host(JOB, *options, arguments=[*arguments, "--out", outs["whole"]])
        first = parted.host(JOB, *options, arguments=[*arguments, "--out", outs["parted"]])
        parted.wait_for_step(first, 3)
        first.interrupt()
        first.exits_with(INTERRUPTED, deadline_s=10)
        assert not outs["parted"].exists()
        reached = parted.step_reached()
        assert 3 <= reached < 12
        second = parted.host(
            JOB, "--resume", str(parted.folder), *options, arguments=[*arguments, "--out", outs["parted"]]
        )
        second.succeeds(deadline_s=60)
        uninterrupted.succeeds(deadline_s=60)
        parted.assert_every_step_is_full(global_batch=24, steps=12)
        assert [e["loss"] for e in parted.steps()] == [e["loss"] for e in whole.steps()]
    expected, found = load_file(outs["whole"]), load_file(outs["parted"])
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} differs"


def test_ctrl_c_while_waiting_for_guests_ends_at_once(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "1", arguments=["--steps", 5])
        # Its hub is open once a stranger is turned away: from then on it waits.
        fleet.wait_for(host, lambda: speaks(fleet.port) and fleet.events("refused_stranger"), "an open port")
        host.interrupt()
        host.exits_with(INTERRUPTED, deadline_s=10)
        assert "Traceback" not in host.stderr()
        fleet.assert_nothing_left()


def test_ctrl_c_before_anything_happened_leaves_no_folder(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "1", arguments=["--steps", 5])
        host.interrupt()
        host.exits_with(INTERRUPTED, deadline_s=20)
        assert list(fleet.runs.iterdir()) == []
        assert host.stderr().split() == ["interrupted"], "there is nothing to go on with"


def speaks(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    return True


def saved_steps(fleet: Fleet) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (fleet.folder / "checkpoints").glob("step-*"))


FAILS = """
import torch, potluck

run = potluck.start()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in run.steps(model, optimizer, torch.randn(32, 4), global_batch=8, steps=20):
    for batch in step:
        step.backward(model(batch).square().mean())
    if step.index == 3:
        raise ValueError("my own bug")
"""


def test_a_script_that_fails_after_a_step_has_failed_and_missing_checkpoints_are_missed(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with Fleet(tmp_path) as fleet:
        host = fleet.host(script, "--checkpoint-every", "1")
        host.exits_with(1, deadline_s=60)
        assert "my own bug" in host.stderr()
        (end,) = fleet.events("run_end")
        assert (end["reason"], end["step"]) == ("failed", 4)
        assert saved_steps(fleet)[-1] == 4
        assert f"resume from the last checkpoint with: potluck host {script} --resume " in host.stderr()
        shutil.rmtree(fleet.folder / "checkpoints")
        again = fleet.host(script, "--resume", str(fleet.folder))
        again.exits_with(2, deadline_s=60)
        assert "saved up to step 4, but there is no checkpoint" in again.stderr()


def test_a_host_that_fails_in_the_update_tells_the_last_step_that_is_finished(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    hook = "lambda *_: 1 / 0 if step.index == 2 else None"
    script.write_text(FAILS.replace("for step in", f"optimizer.register_step_post_hook({hook})\nfor step in"))
    with Fleet(tmp_path) as fleet:
        host = fleet.host(script)
        host.exits_with(1, deadline_s=60)
        assert "ZeroDivisionError" in host.stderr()
        (end,) = fleet.events("run_end")
        last = fleet.steps()[-1]
        assert (end["reason"], end["step"], end["loss"]) == ("failed", 2, last["loss"])
        assert last["step"] == 2
        assert "failed after step 2, " in host.stdout()
