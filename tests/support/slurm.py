"""A Slurm cluster of two nodes on this box: namespaces as machines, Debian's munged, slurmctld and slurmd.

    with TwoMachines(tmp_path / "net") as net, Slurm(net, tmp_path / "slurm") as slurm:
        status, log = slurm.job(Path("job.sh"), "word")

alpha is in the partition `fast`, beta in `slow`. It knows Slurm, nothing of what is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from support.two_machines import Machine, TwoMachines, environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol")
NODES = ("sinfo", "--noheader", "--partition", "all", "--format", "%t %D")
UP_S = 60.0
CONFIG = """
ClusterName=potluck
SlurmctldHost=alpha
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=alpha NodeAddr=10.77.0.1 CPUs=1 State=UNKNOWN
NodeName=beta NodeAddr=10.77.0.2 CPUs=1 State=UNKNOWN
PartitionName=fast Nodes=alpha Default=YES MaxTime=INFINITE State=UP
PartitionName=slow Nodes=beta MaxTime=INFINITE State=UP
PartitionName=all Nodes=alpha,beta MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Which program this box lacks, in words, or None."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"needs Slurm and munge: {', '.join(lacking)}" if lacking else None


class Slurm:
    """The daemons, up from `__enter__` on; they end with the machines' namespaces."""

    def __init__(self, net: TwoMachines, folder: Path) -> None:
        self._net, self._folder = net, folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self._folder / "slurm.conf").write_text(CONFIG.format(folder=self._folder))
        (self._folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        options = [f"--{name}-file={self._folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        options += [f"--socket={self._folder}/munge.socket", "--foreground", "--force"]
        try:
            self._start(self._net.alpha, "munged", *options)
            self._wait_until(lambda: (self._folder / "munge.socket").exists(), "munged")
            self._start(self._net.alpha, "slurmctld", "-D")
            for machine in (self._net.alpha, self._net.beta):
                self._start(machine, "slurmd", "-D", "-N", machine.name)
            self._wait_until(lambda: self.command(*NODES).stdout == "idle 2\n", "nodes")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def command(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command on alpha, whose working directory is /: nsenter changes it."""
        return subprocess.run(
            self._net.alpha.inside(command),
            env=self._environment(env),
            capture_output=True,
            text=True,
            timeout=100,
        )

    def job(self, *words: str, env: Mapping[str, str] | None = None, deadline_s: float = 100.0) -> tuple[str, str]:
        """Submit a batch job (its options, script and arguments) and wait for its end: its exit status, its output.

        `sbatch --wait` would do, but looks only every ten seconds.
        """
        submit = ["sh", "-c", f'cd {self._folder} && exec sbatch --parsable --output=job-%j.log "$@"', "sh", *words]
        done = self.command(*submit, env=env)
        assert done.returncode == 0, done.stderr
        number = done.stdout.strip()
        deadline = time.monotonic() + deadline_s
        while (state := self._state(number)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            log = self._folder / f"job-{number}.log"
            written = log.read_text() if log.exists() else ""
            assert time.monotonic() < deadline, f"job {number} is {state}\n{written}\n{self.logs()}"
            time.sleep(0.1)
        status = re.search(r"ExitCode=(\d+):", self.command("scontrol", "show", "job", number).stdout)
        assert status is not None
        return status[1], (self._folder / f"job-{number}.log").read_text(errors="replace")

    def _state(self, number: str) -> str:
        found = re.search(r"JobState=(\w+)", self.command("scontrol", "show", "job", number).stdout)
        return found[1] if found else "PENDING"

    def logs(self) -> str:
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        return environment({"SLURM_CONF": f"{self._folder}/slurm.conf", "PATH": path, **(more or {})})

    def _start(self, machine: Machine, *command: str) -> None:
        with open(self._folder / f"{command[0]}-{machine.name}.out.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    machine.inside(command),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + UP_S
        while not is_so():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not dead, f"{dead} ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {what}\n{self.logs()}"
            time.sleep(0.1)

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()  # nsenter: what it started ends with its namespace
            daemon.wait(10)
