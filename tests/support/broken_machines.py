"""Ten machines, each broken in its own way, and a healthy one, as sshd processes. Needs root, for mounts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from potluck.spec.fleet_file import NamedMachine
from support.sshd import SshMachines

FINDINGS = {
    "no-key": "ssh-no-key",
    "other-key": "ssh-changed-key",
    "no-python": "no-python",
    "full": "disk-full",
    "password": "ssh-password",
    "noexec": "home-noexec",
    "closed": "ssh-refused",
    "banner": "shell-banner",
    "clock": "clock-off",
    "i686": "no-torch-here",
}
"""The machines, and the code of what is wrong with each."""
HEALTHY = "healthy"
_ORIGINAL = 'sh -c "$SSH_ORIGINAL_COMMAND"'
_CLOCK = "import time\nreal = time.time\ntime.time = lambda: real() - 366 * 86400\n"


@contextmanager
def broken_machines(folder: Path) -> Iterator[tuple[SshMachines, list[NamedMachine]]]:
    with SshMachines(folder) as machines:
        bare = folder / "bare"
        bare.mkdir()
        for program in ("sh", "uname"):
            (bare / program).symlink_to(shutil.which(program) or program)
        later = folder / "later"
        later.mkdir()
        (later / "sitecustomize.py").write_text(_CLOCK)
        machines.add(HEALTHY)
        machines.add("no-key", authorized=False)
        machines.add("other-key")
        _another_key(machines)
        machines.add("no-python", force=f"PATH={bare} {_ORIGINAL}")
        machines.add("full", before=_mounted("size=32k", folder / "full" / "home"))
        machines.add("password", authorized=False, options=("PasswordAuthentication yes",))
        machines.add("noexec", before=_mounted("noexec", folder / "noexec" / "home"))
        machines.add("closed").stop()
        machines.add("banner", force=f"echo Welcome to this machine; echo; {_ORIGINAL}")
        machines.add("clock", env=f"PYTHONPATH={later}")
        machines.add("i686", force=f"setarch i686 {_ORIGINAL}")
        own = (HEALTHY, "banner")
        named = [
            NamedMachine(ssh=name, name=name, python=sys.executable if name in own else "")
            for name in (HEALTHY, *FINDINGS)
        ]
        yield machines, named


def _mounted(how: str, home: Path) -> tuple[str, ...]:
    """Words before sshd that give it a home of its own kind, which it alone sees."""
    return ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {how} none {home} && exec "$@"', "sh")


def _another_key(machines: SshMachines) -> None:
    """Know another machine's key for it."""
    lines = machines.known.read_text().splitlines()
    lines[-1] = f"{lines[-1].split()[0]} {lines[0].split(maxsplit=1)[1]}"
    machines.known.write_text("\n".join(lines) + "\n")
