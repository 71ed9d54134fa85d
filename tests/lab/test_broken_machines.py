"""Ten machines that are broken in different ways are all named at once, each with its cause and its fix."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from potluck.fleet.bootstrap import FleetNeeds
from potluck.fleet.ssh import SshFleet
from potluck.spec.finding import BLOCKER, Finding
from support import sshd
from support.broken_machines import FINDINGS, HEALTHY, broken_machines

ROOT = os.name == "posix" and os.geteuid() == 0
WHY_NOT = sshd.why_not() or (None if ROOT and shutil.which("unshare") else "needs root, for mounts")
pytestmark = [pytest.mark.root, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    found: dict[str, tuple[Finding, ...]] = {}
    logs = tmp_path / "logs"
    logs.mkdir()
    with broken_machines(tmp_path / "machines") as (machines, named):
        fleet = SshFleet(named, FleetNeeds(imports={}), logs=logs, ssh=machines.ssh)
        try:
            usable = fleet.problems(lambda name, findings: found.update({name: tuple(findings)}))
        finally:
            fleet.close()
    assert {name: [f.code for f in findings] for name, findings in found.items()} == {
        HEALTHY: [],
        **{name: [code] for name, code in FINDINGS.items()},
    }
    assert usable == [HEALTHY, "banner"]
    for findings in found.values():
        for finding in findings:
            assert all((finding.what, finding.how, finding.breaks, finding.fix)), finding
            assert finding.machine in finding.fix or "there," in finding.fix or "there:" in finding.fix, finding
            assert (finding.severity == BLOCKER) == (finding.machine not in usable)
