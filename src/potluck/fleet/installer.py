"""What a launcher runs once on a machine: unpacks this Potluck, and makes an environment with what it needs.

It is sent as text and imports only the standard library. Nothing of it needs root. The environment is complete when
it has a file `ready`; a lock keeps two launchers from making it at the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from typing import Any


def main(plan: dict[str, Any]) -> int:
    cache, env = plan["cache"], plan["env"]
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, "lock"), "w") as lock:
        if not _try_lock(lock.fileno()):
            print("another potluck installs here: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        code = os.path.join(cache, plan["code"])
        if not os.path.isdir(code):
            _unpack(os.path.join(cache, plan["code"] + ".whl"), code)
        if plan["make_env"] and not os.path.exists(os.path.join(env, "ready")):
            return _make(env, plan)
    return 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unpack(wheel: str, folder: str) -> None:
    part = f"{folder}.part"
    shutil.rmtree(part, ignore_errors=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(part)
    os.rename(part, folder)
    os.remove(wheel)


def _make(env: str, plan: dict[str, Any]) -> int:
    began = time.monotonic()
    shutil.rmtree(env, ignore_errors=True)
    python = os.path.join(env, "bin", "python")
    uv = plan["uv"]
    print(f"installing {', '.join(plan['requirements'])} into {env} with {'uv' if uv else 'pip'}", flush=True)
    make = [uv, "venv", "-q", "--python", sys.executable, env] if uv else [sys.executable, "-m", "venv", env]
    if subprocess.run(make).returncode:
        return 1
    install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install", "-q"]
    # Compiling all of torch takes half a minute; the check below compiles what an import needs.
    quiet = [] if uv else ["--disable-pip-version-check", "--no-input", "--no-compile"]
    if not _install([*install, *quiet, *plan["requirements"]], plan["pins"], os.path.join(env, "constraints.txt")):
        return 1
    checked = subprocess.run([python, "-c", "import " + ", ".join(plan["modules"])])
    if checked.returncode:
        return 1
    with open(os.path.join(env, "ready"), "w") as file:
        json.dump(plan, file)
    print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _install(command: list[str], pins: list[str], file: str) -> bool:
    """With the host's versions; if this machine's index lacks one, with the host's torch; else what fits."""
    torch = [pin for pin in pins if pin.startswith("torch==")]
    for number, some in enumerate([pins, *([torch] if torch else []), []]):
        if number:
            what = f"with {some[0]}" if some else "with the newest that fit"
            print(f"that failed with the host's versions: trying {what}", flush=True)
        with open(file, "w") as written:
            written.write("\n".join(some) + "\n")
        if not subprocess.run([*command, *(["-c", file] if some else [])]).returncode:
            return True
    return False
