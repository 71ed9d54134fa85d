"""`potluck up --check`: looks at all machines, measures them and predicts. Installs and starts nothing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from potluck.errors import MachineError
from potluck.fleet.bootstrap import FleetNeeds
from potluck.fleet.hostfiles import FleetFile, NamedMachine
from potluck.fleet.ssh import SshFleet
from potluck.report.screen import show
from potluck.report.table import table_lines
from potluck.spec.finding import BLOCKER, Diagnosis, Finding
from potluck.spec.probed import DeviceSpeed, Probed

PROBE_S = 4
ANSWER_S = 60.0


def check(fleet: FleetFile, host: str, wanted: FleetNeeds) -> int:
    """Print findings, a row for each machine, and the plan; the exit status is 1 if a machine cannot be used."""
    from potluck.cli.up import HERE, show_findings

    machines = [*([] if host else [NamedMachine(name=HERE)]), *fleet.machine]
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="potluck-up-") as folder:
        reached = SshFleet(machines, wanted, logs=Path(folder))
        try:
            usable = reached.problems(lambda name, found: findings.extend(found))
            measured = _measure_all(reached, usable, Path(folder), findings)
        finally:
            reached.close()
        show_findings(findings)
        header = ("machine", "state", "device", "samples/s")
        show(table_lines(header, _rows(machines, usable, measured), right={3}), sys.stdout)
        if measured:
            _plan(measured, host or HERE, Path(folder))
    return 1 if any(finding.severity == BLOCKER for finding in findings) else 0


def _measure_all(
    fleet: SshFleet, usable: Sequence[str], folder: Path, findings: list[Finding]
) -> dict[str, Probed]:
    """What `potluck doctor` and `potluck probe` say on each machine that has all they need, by its name."""
    measured: dict[str, Probed] = {}

    def measure(name: str) -> None:
        facts = fleet.reach(name)
        if not (facts.own or facts.facts.ready):
            return  # nothing is installed there yet, and this installs nothing
        try:
            text = _answer(fleet, name, ["doctor", "--json"], folder)
            diagnosis = msgspec.json.decode(text, type=Diagnosis)
            findings.extend(msgspec.structs.replace(finding, machine=name) for finding in diagnosis.findings)
            words = ["probe", "--json", "--seconds", str(PROBE_S), "--name", name]
            measured[name] = msgspec.json.decode(_answer(fleet, name, words, folder), type=Probed)
        except MachineError as error:
            findings.extend(error.findings)
        except msgspec.DecodeError:
            click.echo(f"{name}: did not answer", err=True)

    with ThreadPoolExecutor(max(1, len(usable)), thread_name_prefix="potluck-measure") as pool:
        list(pool.map(measure, usable))
    return measured


def _answer(fleet: SshFleet, name: str, words: Sequence[str], folder: Path) -> str:
    """The JSON that a command of Potluck prints there."""
    log = folder / f"{name}-{words[0]}.json"
    fleet.run(name, ["-m", "potluck", *words], log).wait(ANSWER_S)
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    return text[text.find("{") :]


def _rows(
    machines: Sequence[NamedMachine], usable: Sequence[str], measured: dict[str, Probed]
) -> list[tuple[str, str, str, str]]:
    rows = []
    for machine in machines:
        here = measured[machine.name].here if machine.name in measured else DeviceSpeed(name=machine.name)
        state = "to install" if machine.name in usable else "cannot be used"
        state = "ready" if machine.name in measured else state
        speed = f"{here.samples_per_s:.1f}" if here.samples_per_s else ""
        rows.append((machine.name, state, here.device, speed))
    return rows


def _plan(measured: dict[str, Probed], host: str, folder: Path) -> None:
    """What the measured machines would reach together, with the model that they were measured with."""
    from potluck.cli.plan import plan

    files = []
    for name in sorted(measured, key=lambda name: name != host):
        files.append(folder / f"{name}-facts.json")
        files[-1].write_bytes(msgspec.json.encode(measured[name]))
    speed = next(iter(measured.values())).here
    words = [word for file in files for word in ("--facts", str(file))]
    if speed.model:
        words += ["--model", speed.model]
    if speed.model and speed.sequence:
        words += ["--sequence", str(speed.sequence)]
    click.echo("")
    plan.main(args=words, standalone_mode=False)
    click.echo("links were not measured: see potluck probe --listen", err=True)
