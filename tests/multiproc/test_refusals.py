"""Who does not belong is turned away with a clear word, and the run does not notice."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.wire.keys import new_keys
from potluck.wire.token import decode, encode
from support.fleet import JOB, Fleet
from support.processes import TestProcess

BATCH = 16
REFUSED = 3
DEVICE = ["--device", "paced:0.01", "--micro-batch", "2"]

OTHER_MODEL = """
import torch, potluck
run = potluck.start()
model = torch.nn.Linear(32, 10).to(run.device)
for step in run.steps(model, torch.optim.SGD(model.parameters(), 0.1), [], global_batch=16):
    for points, labels in step:
        step.backward(torch.nn.functional.cross_entropy(model(points), labels))
"""
OTHER_PROTOCOL = """
from potluck.wire import frames
frames.PROTOCOL += 1
frames._PREFIX = frames.MAGIC + bytes([frames.PROTOCOL])
from potluck.wire import token
token.PROTOCOL = frames.PROTOCOL - 1  # or the token's own version would be refused before a word is spoken
from potluck.cli import main
main()
"""


class Refusals:
    """One run with an honest guest, and everybody who tries to get in."""

    def __init__(self, tmp_path: Path) -> None:
        self.fleet = Fleet(tmp_path)
        self.until = tmp_path / "enough"
        self.folder = tmp_path
        self.processes: dict[str, TestProcess] = {}

    def run(self) -> None:
        fleet = self.fleet
        host = fleet.host(JOB, "--wait-for", "1", *DEVICE, arguments=["--batch", BATCH, "--until", self.until])
        ann = fleet.guest("ann", *DEVICE)
        fleet.wait_for_event(host, "guest_joined", "ann")
        self.first_step = fleet.step_reached()
        self._start_everybody()
        speak_gibberish(fleet.port)
        for process in self.processes.values():
            process.wait(deadline_s=60)
        fleet.wait_for_step(host, fleet.step_reached() + 3)
        self.last_step = fleet.step_reached()
        self.until.touch()
        host.succeeds(deadline_s=20)
        ann.succeeds(deadline_s=20)

    def _start_everybody(self) -> None:
        token = decode((self.fleet.folder / "token").read_text())
        other = new_keys()
        tokens = {
            "another-run": replace(token, host_public=other.public, guest_secret=other.guest_secret),
            "another-guest-key": replace(token, guest_secret=other.guest_secret),
        }
        for name, wrong in tokens.items():
            file = self.folder / name
            file.write_text(encode(wrong))
            self.processes[name] = self.fleet.guest(name, "--wait", "20", token=file)
        script = self.folder / "other.py"
        script.write_text(OTHER_MODEL)
        self.processes["other-model"] = self.fleet.guest("other-model", "--script", str(script))
        protocol = self.folder / "protocol.py"
        protocol.write_text(OTHER_PROTOCOL)
        words = (str(protocol), *self.fleet.join_words("other-protocol"))
        self.processes["other-protocol"] = self.fleet.python(*words, name="other-protocol")


def speak_gibberish(port: int) -> None:
    """What a port scanner, a browser and a careless ZeroMQ program would send."""
    no_security = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 1 + 31)
    for words in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 65536, no_security, b""):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(words)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Refusals:
    """The whole story happens once; the tests look at what came of it."""
    story = Refusals(tmp_path_factory.mktemp("refusals"))
    with story.fleet:
        story.run()
    return story


pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("another-run", "is not the host of this token"),
        ("another-guest-key", "refused this token"),
        ("other-model", "a different model"),
        ("other-protocol", "uses protocol"),
    ],
)
def test_whoever_does_not_belong_is_told_so(refusals: Refusals, who: str, words: str) -> None:
    process = refusals.processes[who]
    assert process.returncode == REFUSED, process.tails()
    error = process.stderr()
    assert "Traceback" not in error
    assert error.startswith("error: ")
    assert words in error
    assert "hint: " in error


def test_a_different_model_is_refused_by_its_first_difference(refusals: Refusals) -> None:
    error = refusals.processes["other-model"].stderr()
    # Both values are named: what the host has there and what the guest has.
    assert "0.weight" in error
    assert "[256, 32]" in error
    assert "[10, 32]" in error
    (event,) = refusals.fleet.events("guest_refused", "other-model")
    assert "0.weight" in event["reason"]


def test_the_log_names_them(refusals: Refusals) -> None:
    assert refusals.fleet.events("refused_stranger"), "no event for the wrong keys"
    reasons = [e["reason"] for e in refusals.fleet.events("guest_refused")]
    assert any("protocol" in reason for reason in reasons)


def test_the_run_does_not_notice(refusals: Refusals) -> None:
    fleet = refusals.fleet
    fleet.assert_every_step_is_full(global_batch=BATCH)
    assert refusals.last_step > refusals.first_step + 10
    assert {name for e in fleet.steps() for name in e["samples"]} == {"host", "ann"}
    assert len(fleet.steps_with("ann")) > len(fleet.steps()) / 2
    assert fleet.events("guest_lost") == []
    fleet.assert_nothing_left()
