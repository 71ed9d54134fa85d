"""Tests whether this user may make the lab's namespaces, and if not, why."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from potluck.errors import UserError

PLAIN = ("unshare", "--net", "--")
WITH_USER = ("unshare", "--user", "--map-root-user", "--net", "--")

TRIAL_S = 20.0
_TRIAL = (
    "ip link add name switch type bridge && ip link add name port type veth peer name eth0 && "
    "tc qdisc add dev port root tbf rate 1mbit burst 16000 latency 100ms"
)
_NETEM_TRIAL = "ip link add name port type veth peer name eth0 && tc qdisc add dev port root netem delay 1ms"
_TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
_SWITCHES = (
    ("user/max_user_namespaces", "0", "user namespaces are switched off (user.max_user_namespaces is 0)"),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "user namespaces are for root alone (kernel.unprivileged_userns_clone is 0)",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor keeps users from setting up networks (kernel.apparmor_restrict_unprivileged_userns is 1)",
    ),
)


def environment() -> dict[str, str]:
    """Our PATH, with the folders of ip and tc, which a user's PATH often lacks."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"}


def why_not() -> str | None:
    """Why network namespaces cannot be made here by this user, or None if they can."""
    return None if way() is not None else _reason()


def way() -> tuple[str, ...] | None:
    """The command prefix that gives a command its own network namespace."""
    if sys.platform != "linux" or _missing_tool() is not None:
        return None
    return next((before for before in _ways() if _try(before, _TRIAL) == ""), None)


def require(*, netem: bool) -> tuple[str, ...]:
    """Like `way`, and with delays if requested. Raises an error with the reason if it is not possible."""
    before = way()
    if before is None:
        raise UserError(f"the lab's network cannot be emulated here: {_reason()}", hint=hint())
    if netem and (found := _try(before, _NETEM_TRIAL)):
        raise UserError(
            f"latency_ms needs the kernel's netem, which is not there ({found})",
            hint="leave latency_ms out of the rig; or `potluck lab bench RIG --loopback`, which delays by itself",
        )
    return before


def hint() -> str:
    """A hint for a machine on which it is not possible."""
    elsewhere = "`potluck lab bench RIG --loopback` needs no namespaces"
    if sys.platform != "linux" or os.geteuid() == 0:
        return elsewhere
    return f'run it with sudo (sudo "$(command -v potluck)" lab …); {elsewhere}'


def _ways() -> tuple[tuple[str, ...], ...]:
    return (PLAIN, WITH_USER) if os.geteuid() == 0 else (WITH_USER,)


def _missing_tool() -> str | None:
    path = environment()["PATH"]
    return next((tool for tool in _TOOLS if shutil.which(tool, path=path) is None), None)


@functools.cache  # neither changes while a command runs
def _try(before: tuple[str, ...], script: str) -> str:
    """The failure; empty if it works."""
    try:
        done = subprocess.run(
            [*before, "sh", "-c", script],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"status {done.returncode}"


def _reason() -> str:
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if (tool := _missing_tool()) is not None:
        return f"the command {tool} is missing (Debian: apt install {_TOOLS[tool]})"
    found = _try(_ways()[0], _TRIAL)
    return explain(found, root=os.geteuid() == 0, read=_read_switch, container=_container())


def explain(found: str, *, root: bool, read: Callable[[str], str | None], container: str | None) -> str:
    """The reason, from the output of the trial and the kernel's settings."""
    for name, forbids, words in () if root else _SWITCHES:
        if read(name) == forbids:
            return words
    where = f"; this is a {container} container, which needs to be privileged for it" if container else ""
    return f"the kernel refuses a namespace with a network of its own ({found}){where}"


def _read_switch(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _container() -> str | None:
    signs = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
    return next((kind for path, kind in signs.items() if os.path.exists(path)), None)
