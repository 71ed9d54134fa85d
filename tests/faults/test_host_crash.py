"""The host dies and is started again: nothing acknowledged is lost, no sample twice. Short forms of R2, R3, R7."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from support.campaign import campaign
from support.fleet import JOB, Fleet

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills by name"), pytest.mark.slow]


def test_killed_at_any_moment_with_guests_at_the_table() -> None:
    figures = campaign("r2_host_crash.py", "--times", "3")
    assert figures["times"] == 3


@pytest.mark.parametrize(
    "names",
    [
        ["host.updated", "host.decoded", "checkpoint.replacing", "file.renamed.manifest"],
        ["guest.finished", "guest.sending.grad", "guest.received.lease"],
    ],
    ids=["host", "guest"],
)
def test_killed_at_a_named_moment(names: list[str]) -> None:
    figures = campaign("r3_failpoints.py", "--each", "1", "--only", ",".join(names))
    assert figures["names_killed_at"] == len(names)
    assert "short_of" not in figures


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit() -> None:
    assert campaign("r7_bit_identical.py", "--times", "1")["times"] == 1


def test_a_second_host_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    words = ["--device", "paced:0.01", "--micro-batch", "2", "--checkpoint-every", "2"]
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, *words, arguments=["--batch", 8])
        fleet.wait_for_step(host, 3)
        second = fleet.host(JOB, "--resume", str(fleet.folder), "--port", "0", *words, arguments=["--batch", 8])
        second.exits_with(2, deadline_s=40)
        assert f"in use by process {host.pid}" in second.stderr()
        assert "Traceback" not in second.stderr()
        fleet.wait_for_step(host, fleet.step_reached() + 2)
        host.signal(signal.SIGKILL)
        host.wait(10)
        steps = fleet.step_reached()
        third = fleet.host(
            JOB, "--resume", str(fleet.folder), *words, arguments=["--batch", 8, "--steps", steps + 3]
        )
        third.succeeds(deadline_s=40)
