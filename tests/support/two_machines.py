"""Two machines and the switch between them, as namespaces (network, mounts, names, processes), for the doctor.

    with TwoMachines(tmp_path) as net:
        net.alpha.sh("ip link add docker0 type bridge")
        done = net.alpha.potluck("doctor", "--json")

It knows how they are made and taken down, nothing of what is tested. Each has its own hosts file and resolv.conf.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMAND_S = 100.0
ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}
_HOSTS = "127.0.0.1 localhost\n10.77.0.1 alpha\n10.77.0.2 beta\n"


def why_not() -> str | None:
    """Why this cannot be done here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "mount")):
        return "needs unshare, nsenter, ip and mount"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "ip", "link", "add", "x", "type", "veth"],
        capture_output=True,
        timeout=20,
    )
    return None if done.returncode == 0 else "this box does not allow namespaces"


class Machine:
    """One of them; commands run inside."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)
        self.hosts, self.resolv = folder / "hosts", folder / "resolv.conf"
        self._holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                "sleep 600 & wait",  # the shell also waits for what others have left
            ]
        )
        self.pid = _only_child(self._holder.pid)

    def reset(self) -> None:
        """The files of a healthy machine."""
        self.hosts.write_text(_HOSTS)
        self.resolv.write_text("nameserver 127.0.0.1\n")

    def inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--pid", "--", *command]

    def sh(self, script: str) -> str:
        done = subprocess.run(self.inside(["sh", "-ec", script]), capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, f"{self.name}: {script}: {done.stderr}"
        return done.stdout

    def potluck(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside([sys.executable, "-m", "potluck", *arguments]),
            env=environment(env),
            cwd=self.folder,
            capture_output=True,
            encoding="utf-8",
            timeout=COMMAND_S,
        )

    @contextlib.contextmanager
    def running(self, *command: str, until: str) -> Iterator[str]:
        """Something in the background; yields what it has written when `until` is in it."""
        log = self.folder / f"running-{time.monotonic_ns()}"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                self.inside(command),
                env=environment(),
                cwd=self.folder,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + COMMAND_S
            while until not in (written := log.read_text(encoding="utf-8")):
                assert process.poll() is None, log.read_text(encoding="utf-8")
                assert time.monotonic() < deadline, f"no {until!r} in: {written}"
                time.sleep(0.02)
            yield written
        finally:
            # The whole group: nsenter is only the parent of what runs inside.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self._holder.kill()  # with --kill-child all that runs inside goes too
        self._holder.wait(10)


class TwoMachines:
    """alpha and beta on one switch; all of it is gone at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: list[Machine] = []

    def __enter__(self) -> Self:
        try:
            self._bring_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def _bring_up(self) -> None:
        self.switch = self._machine("switch")
        self.alpha = self._machine("alpha")
        self.beta = self._machine("beta")
        self.switch.sh("ip link add switch type bridge && ip link set switch up")
        for machine in (self.alpha, self.beta):
            port = f"to-{machine.name}"
            # From outside: in there, other machines' processes have no numbers.
            cable = f"ip link add {port} type veth peer name eth0 netns {machine.pid}".split()
            subprocess.run(["nsenter", "-t", str(self.switch.pid), "--net", *cable], check=True, timeout=COMMAND_S)
            self.switch.sh(f"ip link set {port} master switch && ip link set {port} up")
            machine.reset()
            # One packet at a time, as on a cable: what is still to be cut up passes any MTU of a virtual one.
            machine.sh("ip link set eth0 gso_max_segs 1")
            machine.sh(
                f"ip addr add {ADDRESSES[machine.name]}/24 dev eth0 && ip link set eth0 up && ip link set lo up && "
                f"mount --bind {machine.hosts} /etc/hosts && mount --bind {machine.resolv} /etc/resolv.conf && "
                f"echo {machine.name} > /proc/sys/kernel/hostname"
            )

    def _machine(self, name: str) -> Machine:
        machine = Machine(name, self._folder / name)
        self._machines.append(machine)
        return machine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def _take_down(self) -> None:
        for machine in self._machines:
            machine.close()


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a clean machine: nothing of ours that a check would name."""
    names = ("PATH", "LANG", "HOME")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1", **(more or {})}


def _only_child(pid: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        # Only once it is the command that was asked for, its namespaces and its /proc are there.
        if children and b"sleep" in Path(f"/proc/{children[0]}/cmdline").read_bytes():
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("unshare did not start its child")
