"""Real sshd processes for tests: each is a machine with its own port, user, host key and home.

    with SshMachines(tmp_path) as machines:
        machines.add("laptop")
        ... SshFleet([NamedMachine(ssh="laptop", …)], …, ssh=machines.ssh)

It knows how they are made and taken down, nothing of what is tested. Without root all machines are this user's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
SOURCE = Path(__file__).resolve().parents[2] / "src"


def why_not() -> str | None:
    """Why this cannot be done here, or None."""
    if sys.platform != "linux":
        return "needs Linux"
    if SSHD is None or shutil.which("ssh") is None:
        return "needs openssh-server and openssh-client (make system-packages)"
    return None


class SshMachine:
    """One sshd. `home` is the folder in which its commands start, with the cache in it."""

    def __init__(self, name: str, folder: Path, address: str, port: int, user: str) -> None:
        self.name, self.folder, self.address, self.port, self.user = name, folder, address, port, user
        self.home = folder / "home"
        self.process: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


class SshMachines:
    """Starts sshd processes, writes an ssh config that reaches them by name, and ends all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: list[SshMachine] = []
        self._config = folder / "config"
        self.known = folder / "known_hosts"
        self.key = folder / "key"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Other users read their authorized_keys below it.
        for path in (self.folder, *self.folder.parents):
            with contextlib.suppress(PermissionError):
                if path.stat().st_uid == os.geteuid() and path != Path(path.anchor):
                    path.chmod(path.stat().st_mode | 0o711)
        _keygen(self.key)
        self._config.write_text("")
        self.known.write_text("")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.machines:
            machine.stop()

    @property
    def ssh(self) -> tuple[str, ...]:
        """The program ssh, with a config in which the machines are known."""
        return ("ssh", "-F", str(self._config))

    @property
    def variables(self) -> dict[str, str]:
        """For `potluck up`: a PATH in which `ssh` has that config."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self._config} "$@"\n')
        program.chmod(0o755)
        return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def add(
        self,
        name: str,
        *,
        force: str = "",
        env: str = "",
        address: str = "127.0.0.1",
        before: tuple[str, ...] = (),
        user: str = "",
        options: tuple[str, ...] = (),
        authorized: bool = True,
        known: bool = True,
        reachable: bool = True,
    ) -> SshMachine:
        """Start one. `force`: a command in place of the one that is asked for; `before`: words before sshd."""
        folder = self.folder / name
        folder.mkdir()
        import pwd  # not on Windows

        user = user or pwd.getpwuid(os.geteuid()).pw_name
        machine = SshMachine(name, folder, address, _free_port(), user)
        machine.home.mkdir()
        _keygen(folder / "host_key")
        keys = folder / "authorized_keys"
        keys.write_text(self.key.with_suffix(".pub").read_text() if authorized else "")
        owner = pwd.getpwnam(user)
        if os.geteuid() == 0:
            for path in (machine.home, keys):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        lines = [
            *options,  # sshd takes the first value of each
            f"Port {machine.port}",
            f"ListenAddress {address}",
            f"HostKey {folder / 'host_key'}",
            f"PidFile {folder / 'pid'}",
            f"AuthorizedKeysFile {keys}",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "LogLevel QUIET",
            f"SetEnv HOME={machine.home}{' ' + env if env else ''}",
            *([f"ForceCommand {force}"] if force else []),
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        assert SSHD is not None
        machine.process = subprocess.Popen(
            [*before, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(folder / "sshd.log", "wb"),  # noqa: SIM115
            start_new_session=True,
        )
        self.machines.append(machine)
        if reachable:
            _wait_for_port(address, machine)
        self._introduce(machine, known=known)
        return machine

    def _introduce(self, machine: SshMachine, *, known: bool) -> None:
        with self._config.open("a") as config:
            config.write(
                f"Host {machine.name}\n HostName {machine.address}\n Port {machine.port}\n User {machine.user}\n"
                f" IdentityFile {self.key}\n IdentitiesOnly yes\n UserKnownHostsFile {self.known}\n"
                f" GlobalKnownHostsFile /dev/null\n"
            )
        if known:
            public = (machine.folder / "host_key.pub").read_text().split()
            with self.known.open("a") as file:
                file.write(f"[{machine.address}]:{machine.port} {public[0]} {public[1]}\n")


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_port(address: str, machine: SshMachine) -> None:
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, machine.port), 1):
            return
        assert machine.process is not None
        assert machine.process.poll() is None, (machine.folder / "sshd.log").read_text()
        assert time.monotonic() < deadline, "sshd does not answer"
        time.sleep(0.02)
