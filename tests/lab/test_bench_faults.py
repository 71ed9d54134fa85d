"""`potluck lab bench --faults` from the outside, on loopback and in namespaces: who is struck, what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.lab.permission import why_not
from support.processes import Processes

REASON = why_not()
RIG = """
name = "struck"
[workload]
depth = 1
sequence = 32
global_batch = 16
steps = 18
[[machine]]
name = "desk"
role = "host"
seconds_per_sample = 0.012
[[machine]]
name = "laptop"
seconds_per_sample = 0.02
link_mbit = 200
"""
FAULTS = """
[[fault]]
kind = "delay"
at_step = 3
for_s = 0.5
delay_ms = 40
[[fault]]
kind = "reset"
at_step = 5
[[fault]]
machine = "laptop"
kind = "stop"
at_step = 10
for_s = 0.5
[[fault]]
kind = "kill"
at_step = 14
[[fault]]
kind = "blackhole"
at_s = 1000
for_s = 1
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "options",
    [
        ["--loopback", "--no-plots"],
        pytest.param([], marks=pytest.mark.skipif(REASON is not None, reason=str(REASON))),
    ],
    ids=["loopback", "namespaces"],
)
def test_every_step_is_full_whatever_strikes_the_guest(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "rig.toml").write_text(RIG)
    (tmp_path / "faults.toml").write_text(FAULTS)
    command = ["lab", "bench", str(tmp_path / "rig.toml"), "--json", "-"]
    command += ["--faults", str(tmp_path / "faults.toml"), "--out", str(tmp_path / "out"), *options]
    with Processes(tmp_path) as processes:
        # Alone twice, a host, a guest, and this one again after it was killed.
        found: dict[str, Any] = json.loads(processes.potluck(*command, children=5).succeeds(deadline_s=140))
    row = {row["strategy"]: row for row in found["rows"]}["potluck"]
    assert row["samples_per_step"] == [16, 16]
    faults = found["faults"]
    assert [f["kind"] for f in faults["applied"]] == ["delay", "reset", "stop", "kill"]
    assert [f["step"] for f in faults["applied"]] == sorted(f["step"] for f in faults["applied"])
    assert {f["machine"] for f in faults["applied"]} == {"laptop"}
    assert faults["missed"] == 1
    # The reset broke its connections; how soon it is back is a matter of how busy this box is.
    assert faults["lost"]["laptop"] >= 1
    assert faults["rejoined"].keys() <= {"laptop"}
    assert faults["slowest_step_s"] >= faults["median_step_s"] > 0
    assert found["notes"] == {}
    if not options:
        assert "fault" in (tmp_path / "out" / "timeline.svg").read_text()
