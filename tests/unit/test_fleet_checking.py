"""`potluck up --check`: in which order machines are measured, and what is planned with."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from potluck.fleet.checking import FleetCheck, TriedWork, first_steps
from potluck.fleet.interface import GuestEnd
from potluck.report.plan_table import plan_lines
from potluck.spec.fleet_file import NamedMachine
from potluck.spec.measured import Measured
from potluck.spec.probed import DeviceSpeed, Probed


class Fleet:
    """Machines that take a moment for each command; `together` holds those that were measured at the same time."""

    def __init__(self, boxes: dict[str, str]) -> None:
        self._boxes, self._lock = boxes, threading.Lock()
        self._running: list[str] = []
        self.together: set[tuple[str, ...]] = set()

    def machine(self, name: str) -> NamedMachine:
        return NamedMachine(ssh=name, name=name, threads=3)

    def reach(self, name: str) -> Any:
        return SimpleNamespace(own=True, facts=SimpleNamespace(box=self._boxes[name], ready=True))

    def run(self, name: str, words: list[str], log: Path, feed: str = "") -> Any:
        with self._lock:
            self._running.append(name)
            self.together.add(tuple(sorted(self._running)))
        time.sleep(0.05)
        with self._lock:
            self._running.remove(name)
        if "probe" in words:
            assert words[words.index("--threads") + 1] == "3"
            log.write_bytes(msgspec.json.encode(Probed(here=DeviceSpeed(name=name, samples_per_s=5.0))))
        else:
            log.write_text('{"findings": [], "fine": []}')
        return SimpleNamespace(wait=lambda timeout_s: GuestEnd(0, ""))


def test_two_names_of_one_box_are_not_measured_at_the_same_time(tmp_path: Path) -> None:
    fleet: Any = Fleet({"here": "x", "laptop": "x", "desk": "y"})
    checking = FleetCheck(fleet, "here", tmp_path, print)
    checking.measure(["here", "laptop", "desk"])
    assert set(checking.measured) == {"here", "laptop", "desk"}
    assert checking.measured["here"].host
    assert not checking.measured["desk"].host
    assert ("here", "laptop") not in fleet.together
    assert {("desk", "here"), ("desk", "laptop")} & fleet.together
    (finding,) = checking.findings
    assert (finding.code, finding.machine) == ("one-machine", "here")
    assert "laptop: the same machine" in finding.what


def test_a_command_that_fails_is_told_with_its_reason_not_as_too_slow(tmp_path: Path) -> None:
    class Failing(Fleet):
        def run(self, name: str, words: list[str], log: Path, feed: str = "") -> Any:
            task = super().run(name, words, log, feed)
            if "probe" in words and name == "desk":
                log.write_text("error: this machine has no device 'cuda'\nhint: cpu\n")
                task.wait = lambda timeout_s: GuestEnd(2, "ended with status 2: error: this machine has no ...")
            if "probe" in words and name == "slow":
                log.write_text("")
                task.wait = lambda timeout_s: None
            return task

    told: list[str] = []
    fleet: Any = Failing({"here": "x", "desk": "y", "slow": "z"})
    checking = FleetCheck(fleet, "here", tmp_path, told.append)
    checking.measure(["here", "desk", "slow"])
    assert set(checking.measured) == {"here"}
    assert checking.silent == {"desk", "slow"}
    assert sorted(told) == [
        "desk: ended with status 2: error: this machine has no ...",
        "slow: did not answer within 180 s",
    ]


def test_the_plan_is_of_the_scripts_model_with_the_measured_links(tmp_path: Path) -> None:
    checking = FleetCheck(SimpleNamespace(), "here", tmp_path, print)  # type: ignore[arg-type]
    checking.measured = {
        "here": Measured(name="here", flops_per_s=2e9, host=True),
        "desk": Measured(name="desk", flops_per_s=6e9, link_bytes_per_s=1e8, latency_s=1e-4),
    }
    checking._tried = TriedWork(
        name="t.py", parameters=7_000_000, batch=64, tokens_per_sample=1, samples_per_s=10.0
    )
    found = checking.plan()
    assert found is not None
    output = "\n".join(line.plain for line in plan_lines(found, 100, whole=True))
    assert "t.py   7 M parameters, 64 samples a step" in output
    # desk is three times as fast as the host, on which the script did 10 samples/s.
    assert "10.0 samples/s" in output
    assert "30.0 samples/s" in output
    assert "no link given" not in output


def test_a_script_that_ends_before_its_first_step_is_not_measured(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\n{not an event\n")
    task: Any = SimpleNamespace(wait=lambda timeout_s: GuestEnd(1, "x"))
    assert first_steps(task, log) is None
