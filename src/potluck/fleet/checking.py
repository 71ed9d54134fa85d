"""Checks all machines of a fleet before a run: their problems, the speed of machines and links, and a prediction.

Installs nothing, and starts no run. It runs the first steps of a script or recipe on the host's machine alone, in a
run folder that is removed afterwards, to learn the size and speed of its model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.errors import MachineError
from potluck.fleet.launching import HostWork
from potluck.fleet.remote import RemoteTask
from potluck.fleet.ssh import SshFleet
from potluck.plan import advice, fleet_inputs, models
from potluck.spec.events import RunStarted, StepEnded, from_json
from potluck.spec.finding import BLOCKER, WARNING, Diagnosis, Finding
from potluck.spec.fleet import Plan
from potluck.spec.measured import Measured
from potluck.spec.probed import Probed

PROBE_S, LINK_S = 3, 2
ANSWER_S = 180.0
"""Time limit of a command there. A busy machine takes a minute to import torch."""
LISTEN_S = 600
ENOUGH_STEPS, ENOUGH_S = 8, 6.0
"""Steps of the script, and seconds of them, after which its speed is known."""


class TriedWork(Struct, frozen=True, kw_only=True):
    """The facts about a script's model from its first steps."""

    name: str
    parameters: int
    batch: int
    tokens_per_sample: int
    samples_per_s: float
    """Samples per second while computing on the host's machine."""


class FleetCheck:
    """The findings and measurements of all machines of a fleet."""

    def __init__(self, fleet: SshFleet, host: str, folder: Path, tell: Callable[[str], None]) -> None:
        """`folder` is for logs; `tell` shows a sentence."""
        self._fleet, self._host, self._folder, self._tell = fleet, host, folder, tell
        self.findings: list[Finding] = []
        self.measured: dict[str, Measured] = {}
        self.silent: set[str] = set()
        """Machines that gave no answer: not in time, or because a command there failed."""
        self._failures: dict[str, str] = {}
        """How the last command of each machine failed; empty if it did not, or has not ended."""
        self._tried: TriedWork | None = None

    def look(self, bind: Sequence[str], work_on: Callable[[SshFleet, Path], HostWork] | None) -> Sequence[str]:
        """Run all checks. Returns the names of the usable machines.

        `bind`: words for a listener on the host's machine. `work_on`: what the host would run, with run folders in
        this folder; None: no script was given.
        """
        usable = self._fleet.problems(lambda name, found: self.findings.extend(found))
        self.measure(usable)
        if self._host in self.measured:
            self.measure_links(bind)
            if work_on is not None:
                self.try_work(work_on)
        return usable

    def measure(self, usable: Sequence[str]) -> None:
        """The results of `potluck doctor` and `potluck probe` on each machine with all requirements.

        If several names are one machine, they run one after the other, because together they would share its
        processor.
        """
        boxes: dict[str, list[str]] = {}
        for name in usable:
            reached = self._fleet.reach(name)
            if reached.own or reached.facts.ready:  # else nothing is installed there yet, and this installs nothing
                boxes.setdefault(reached.facts.box or name, []).append(name)
        self.findings += [_one_machine(names) for names in boxes.values() if len(names) > 1]

        def one_by_one(names: list[str]) -> None:
            for name in names:
                with self._told(name):
                    diagnosis = checked.decode(self._answer(name, ["doctor", "--json"]), Diagnosis)
                    self.findings += [replace(finding, machine=name) for finding in diagnosis.findings]
                    machine = self._fleet.machine(name)
                    given = {
                        "device": machine.device,
                        "threads": machine.threads,
                        "micro-batch": machine.micro_batch,
                    }
                    words = ["probe", "--json", "--seconds", str(PROBE_S), "--name", name]
                    words += [word for key, value in given.items() if value for word in (f"--{key}", str(value))]
                    probed = checked.decode(self._answer(name, words), Probed)
                    self.measured[name] = replace(probed.measured[0], host=name == self._host)

        with ThreadPoolExecutor(max(1, len(boxes)), thread_name_prefix="potluck-measure") as pool:
            list(pool.map(one_by_one, boxes.values()))

    def measure_links(self, bind: Sequence[str]) -> None:
        """The link between the host and each guest, one at a time, encrypted as in a run."""
        guests = [name for name in self.measured if name != self._host]
        if not guests:
            return
        words = ["probe", "--listen", "--no-device", "--no-iperf3", "--for", str(LISTEN_S), *bind]
        listener = self._fleet.run(self._host, ["-m", "potluck", *words], self._folder / "listen.log")
        try:
            listener.shown.wait(ANSWER_S)
            if not listener.shown_token:
                why = _tail(self._folder / "listen.log")
                self.findings += [self._no_way(name, f"nothing listens on {self._host}: {why}") for name in guests]
                return
            for name in guests:
                words = ["probe", "--json", "--no-device", "--no-iperf3", "--seconds", str(LINK_S)]
                with self._told(name):
                    text = self._answer(name, [*words, "--token-file", "-"], feed=listener.shown_token + "\n")
                    if not text:
                        self.findings.append(self._no_way(name, _tail(self._folder / f"{name}-probe.log")))
                        continue
                    link = checked.decode(text, Probed).link
                    if link is not None and link.idle is not None:
                        self.measured[name] = replace(
                            self.measured[name],
                            link_bytes_per_s=link.slower_bytes_per_s,
                            latency_s=link.idle.p50_s / 2,
                        )
        finally:
            listener.end()

    def try_work(self, work_on: Callable[[SshFleet, Path], HostWork]) -> None:
        """Run the first steps of the host's work, on its machine and alone."""
        remote = bool(self._fleet.machine(self._host).ssh)
        facts = self._fleet.reach(self._host).facts
        runs = Path(f"{facts.cache}/check-{facts.pid}") if remote else self._folder / "runs"
        work = work_on(self._fleet, runs)
        log = self._folder / "work.log"
        with self._told(self._host):
            link = self._fleet.prepare(self._host).link
            for path, content in work.files.items():
                link.put(path, content, log)
            task = self._fleet.run(self._host, work.words, log, cwd=work.cwd)
            try:
                self._tried = first_steps(task, log)
                if self._tried is None:
                    self.findings.append(self._not_tried(_tail(log)))
            finally:
                task.end(0.0)
                remove = ["-c", "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)", str(runs)]
                self._fleet.run(self._host, remove, log).wait(ANSWER_S)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Inside, a machine that fails becomes a finding."""
        try:
            yield
        except MachineError as error:
            self.findings += error.findings
        except msgspec.DecodeError:
            self.silent.add(name)
            self._tell(f"{name}: {self._failures.get(name) or f'did not answer within {ANSWER_S:.0f} s'}")

    def _answer(self, name: str, words: Sequence[str], feed: str = "") -> str:
        """The JSON that a command of Potluck prints there; empty if there is none."""
        log = self._folder / f"{name}-{words[0]}.log"
        log.unlink(missing_ok=True)
        ended = self._fleet.run(name, ["-m", "potluck", *words], log, feed=feed).wait(ANSWER_S)
        self._failures[name] = ended.why if ended is not None else ""
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        begin = text.find("{")
        return text[begin:] if begin >= 0 else ""

    def _no_way(self, name: str, why: str) -> Finding:
        return Finding(
            code="no-way-to-host",
            severity=BLOCKER,
            machine=name,
            what=f"it cannot connect to the host, {self._host}",
            how=why,
            breaks="a guest there could not join",
            fix=f"potluck doctor --listen   (on {self._host}; type the line that it prints on {name}: it says "
            "which side blocks)",
        )

    def _not_tried(self, why: str) -> Finding:
        return Finding(
            code="script-failed",
            severity=BLOCKER,
            machine=self._host,
            what="the script did not reach its first steps there",
            how=why,
            breaks="the run would end in the same way",
            fix="run it alone on the host's machine: potluck host SCRIPT",
        )

    def plan(self) -> Plan | None:
        """The prediction for the measured machines together; None if the host could not be measured."""
        host = self.measured.get(self._host)
        if host is None:
            return None
        machines = list(self.measured.values())
        tried = self._tried
        if tried is not None and host.flops_per_s:
            # The script was timed on the host only. The other machines are to the host as they are with the probe.
            model = models.Model(
                name=tried.name,
                parameters=tried.parameters,
                flops_per_sample=host.flops_per_s / tried.samples_per_s,
                tokens_per_sample=tried.tokens_per_sample,
            )
            batch = tried.batch
            machines = [replace(m, samples_per_s=None, model="", micro_batch=None) for m in machines]
        else:
            model = models.find(host.model or "gpt", host.sequence)
            batch = models.batch_of(model, None, None)
        table = {"measured": [msgspec.to_builtins(machine) for machine in machines]}
        given = fleet_inputs.from_facts([("the measured machines", table)], model)
        return advice.plan(model.job(batch, "auto"), given.fleet, (), given.assumptions)


def _one_machine(names: Sequence[str]) -> Finding:
    return Finding(
        code="one-machine",
        severity=WARNING,
        machine=names[0],
        what=f"{', '.join(names[1:])}: the same machine by another name",
        how="the same boot_id, or the same name",
        breaks="they share its processor: together they are no faster than one, whatever the plan below says",
        fix=f"potluck up without {' '.join(names[1:])}",
    )


def first_steps(task: RemoteTask, log: Path) -> TriedWork | None:
    """The facts from the events in its log, once there are enough; None if it never reached a step."""
    began = 0.0
    while True:
        ended = task.wait(0.2) is not None
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        lines = text.splitlines(keepends=True)
        events = [from_json(line) for line in lines if line.startswith('{"event"') and line.endswith("\n")]
        start = next((event for event in events if isinstance(event, RunStarted)), None)
        steps = [event for event in events if isinstance(event, StepEnded)]
        began = began or (time.monotonic() if steps else 0.0)
        if ended or len(steps) >= ENOUGH_STEPS or (steps and time.monotonic() - began > ENOUGH_S):
            break
    rates = [machine.rate for step in steps for machine in step.machines if machine.role == "host" and machine.rate]
    if start is None or not rates:
        return None
    return TriedWork(
        name=start.recipe,
        parameters=start.trained_parameters,
        batch=start.global_batch,
        tokens_per_sample=round(start.tokens_per_sample or 1),
        samples_per_s=rates[-1],
    )


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8").splitlines()[-3:])[-300:] if log.exists() else "no answer"
