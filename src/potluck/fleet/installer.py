"""A launcher runs this once on a machine: it unpacks this Potluck, and makes an environment with its requirements.

It is sent as text and imports only the standard library. It needs no root. The environment is complete when it has
a file `ready`; a lock keeps two launchers from making it at the same time. uv installs the packages, fetched by pip
if necessary; if that fails, pip installs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from typing import TypedDict

_PIP = ("--disable-pip-version-check", "--no-input")
_VARIABLES = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
"""Settings of pip, and uv's variables for the same."""


class InstallPlan(TypedDict):
    """`main`'s argument."""

    cache: str
    code: str
    env: str
    make_env: bool
    """Whether to make the environment if it does not exist."""
    uv: str
    """Path of the program; empty if there is none."""
    requirements: list[str]
    pins: list[str]
    modules: list[str]
    """Modules that must be importable afterwards."""


def main(plan: InstallPlan) -> int:
    cache, env = plan["cache"], plan["env"]
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, "lock"), "w") as lock:
        if not _locked(lock.fileno(), wait=False):
            print("another potluck installs here: waiting for it", flush=True)
            _locked(lock.fileno(), wait=True)
        code = os.path.join(cache, plan["code"])
        if not os.path.isdir(code):
            _unpack(os.path.join(cache, plan["code"] + ".whl"), code)
        if plan["make_env"] and not os.path.exists(os.path.join(env, "ready")):
            return _make(env, plan)
    return 0


def _locked(descriptor: int, *, wait: bool) -> bool:
    import fcntl  # Windows has none, and imports this module to send it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _unpack(wheel: str, folder: str) -> None:
    part = f"{folder}.part"
    shutil.rmtree(part, ignore_errors=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(part)
    os.rename(part, folder)
    os.remove(wheel)


def _make(env: str, plan: InstallPlan) -> int:
    clock = _Clock()
    shutil.rmtree(env, ignore_errors=True)
    python = os.path.join(env, "bin", "python")
    # ensurepip takes 4 s. From 22.3 on, this interpreter's own pip can install into another environment.
    pip = [sys.executable, "-m", "pip", "--python", python]
    if not (shared := not subprocess.run([*pip[:4], sys.executable, "--version"], capture_output=True).returncode):
        pip = [python, "-m", "pip"]
    make = [sys.executable, "-m", "venv", *(["--without-pip"] if shared else [])]
    if plan["uv"]:
        make = [plan["uv"], "venv", "-q", "--python", sys.executable]
    if not _works([*make, env]):
        return 1
    clock.at("environment")
    print(f"installing {', '.join(plan['requirements'])} into {env}", flush=True)
    with_uv = _uv(plan, pip, python)
    clock.at("uv")
    # Compiling all of torch takes half a minute; the check below compiles what an import needs.
    with_pip = [*pip, "install", "-q", *_PIP, "--no-compile"]
    constraints = os.path.join(env, "constraints.txt")
    if not any(_install([*c, *plan["requirements"]], plan["pins"], constraints) for c in (with_uv, with_pip) if c):
        return 1
    clock.at("packages")
    if not _works([python, "-c", "import " + ", ".join(plan["modules"])]):
        return 1
    clock.at("first import")
    with open(os.path.join(env, "ready"), "w") as file:
        json.dump(plan, file)
    print(f"installed in {clock}", flush=True)
    return 0


class _Clock:
    """The phases of the time."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: list[str] = []

    def at(self, part: str) -> None:
        now = time.monotonic()
        self._parts.append(f"{part} {now - self._last:.1f}")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._began:.1f} s ({', '.join(self._parts)})"


def _works(command: list[str]) -> bool:
    try:
        return not subprocess.run(command).returncode
    except OSError as error:  # a uv of another architecture
        print(error, flush=True)
        return False


def _uv(plan: InstallPlan, pip: list[str], python: str) -> list[str]:
    """The command that installs with uv; empty if there is none and pip cannot fetch it.

    uv unpacks torch in 4 s, pip in 12 s of one core. A fetched uv does not know this machine's index, so it gets
    pip's settings. An installed uv has its own.
    """
    install = ["pip", "install", "-q", "--python", python]
    if plan["uv"]:
        return [plan["uv"], *install]
    folder = os.path.join(plan["cache"], "uv")
    uv = os.path.join(folder, "bin", "uv")
    fetch = [*pip, "install", "-q", *_PIP, "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    if not os.path.exists(uv):
        done = subprocess.run([*fetch, "--target", folder, "uv"], capture_output=True)
        if done.returncode or not os.path.exists(uv):
            return []
    os.environ.setdefault("UV_CACHE_DIR", os.path.join(plan["cache"], "uv-cache"))
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    words, variables = _settings(listed.stdout)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return [uv, *install, *words]


def _settings(listed: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables for uv that say where packages come from, from what `pip config list` printed."""
    words = ["--index-strategy", "unsafe-best-match"]  # as pip chooses
    variables = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}  # as pip; the second is its name in older versions
    index = ""
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        option, value = name.rpartition(".")[2], value.strip("'\"").replace("\\n", " ")
        if option == "index-url" and (name.startswith(":env:") or not index):
            index = value
        elif option in ("extra-index-url", "find-links"):
            words += [word for each in value.split() for word in (f"--{option}", each)]
        elif option == "trusted-host":
            words += [word for each in value.split() for word in ("--allow-insecure-host", each)]
        elif option in _VARIABLES:
            variables |= dict.fromkeys(_VARIABLES[option], value)
        elif option == "no-index" and value.lower() in ("1", "true", "yes", "on"):
            words.append("--no-index")
    return words + (["--index-url", index] if index else []), variables


def _install(command: list[str], pins: list[str], file: str) -> bool:
    """Install the host's versions; if this machine's index lacks one, only the host's torch; else any that fit."""
    torch = [pin for pin in pins if pin.startswith("torch==")]
    for number, some in enumerate([pins, *([torch] if torch else []), []]):
        if number:
            what = f"with {some[0]}" if some else "with the newest that fit"
            print(f"that failed with the host's versions: trying {what}", flush=True)
        with open(file, "w") as written:
            written.write("\n".join(some) + "\n")
        if _works([*command, *(["-c", file] if some else [])]):
            return True
    return False
