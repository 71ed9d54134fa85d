"""`potluck up --check`: shows the problems of each machine, its speed, the rate of its link, and a plan."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from potluck.fleet.bootstrap import FleetNeeds
from potluck.fleet.checking import FleetCheck
from potluck.fleet.launching import HostWork
from potluck.fleet.local import HERE
from potluck.fleet.ssh import SshFleet
from potluck.report.plan_table import plan_lines
from potluck.report.screen import columns, show
from potluck.report.table import table_lines
from potluck.spec.finding import BLOCKER
from potluck.spec.fleet_file import FleetFile, NamedMachine
from potluck.spec.measured import Measured
from potluck.units import bits_text, seconds_text


def check(
    fleet: FleetFile,
    host: str,
    wanted: FleetNeeds,
    bind: Sequence[str],
    work_on: Callable[[SshFleet, Path], HostWork] | None,
) -> int:
    """Print findings, a row for each machine, and the plan; the exit status is 1 if a machine cannot be used, or
    gave no answer.

    `bind` and `work_on` as for `FleetCheck.look`.
    """
    from potluck.cli.up import show_findings

    machines = [*([] if host else [NamedMachine(name=HERE)]), *fleet.machine]
    with tempfile.TemporaryDirectory(prefix="potluck-up-") as name:
        folder = Path(name)
        reached = SshFleet(machines, wanted, logs=folder)
        found = FleetCheck(reached, host or HERE, folder, lambda line: click.echo(line, err=True))
        try:
            usable = found.look(bind, work_on)
        finally:
            reached.close()
    show_findings(found.findings)
    header = ("machine", "state", "device", "probe, samples/s", "to the host", "round trip")
    show(table_lines(header, _rows(found, machines, usable), right={3, 4, 5}), sys.stdout)
    if (plan := found.plan()) is not None:
        click.echo("")
        show(plan_lines(plan, columns(), whole=not sys.stdout.isatty()), sys.stdout)
    return 1 if found.silent or any(finding.severity == BLOCKER for finding in found.findings) else 0


def _rows(checked: FleetCheck, machines: Sequence[NamedMachine], usable: Sequence[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for machine in machines:
        found = checked.measured.get(machine.name, Measured(name=machine.name))
        state = "to install" if machine.name in usable else "cannot be used"
        state = "no answer" if machine.name in checked.silent else state
        state = "ready" if machine.name in checked.measured else state
        speed = f"{found.samples_per_s:.1f}" if found.samples_per_s else ""
        link = bits_text(found.link_bytes_per_s) if found.link_bytes_per_s else ""
        round_trip = seconds_text(2 * found.latency_s) if found.latency_s is not None else ""
        rows.append((machine.name, state, found.device, speed, link, round_trip))
    return rows
