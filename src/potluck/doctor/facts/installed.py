"""Installed software: torch and what it is built for, GPUs and their drivers, power settings."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import msgspec
import psutil

from potluck import checked
from potluck.doctor.facts.system import System
from potluck.spec.facts import Gpu, Power, Torch

IMPORT_S = 7.0
"""Imports torch in a separate process, because it can take long and a broken driver can hang it."""
_ASK = (
    "import json, torch; m = torch.backends.mps; "
    "print(json.dumps([torch.cuda.is_available(), m.is_built(), m.is_available()]))"
)


def torch_facts(system: System, gpus: tuple[Gpu, ...]) -> Torch:
    """torch's version and builds from its files. It is imported, in another process, only if a GPU may be
    usable."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return Torch(error=str(error))
    if spec is None or not spec.origin:
        return Torch(error="it is not installed")
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        return Torch(error=f"its files cannot be read: {error.strerror}")
    version, cuda, hip = (version_field(text, name) for name in ("__version__", "cuda", "hip"))
    usable = (cuda is not None or hip is not None) and any(g.vendor in ("nvidia", "amd") for g in gpus)
    if not usable and system.platform != "darwin":
        return Torch(version=version, cuda_build=cuda, hip_build=hip)
    said = system.run(sys.executable, "-c", _ASK, timeout_s=IMPORT_S)
    answers = answered(said.out if said else "")
    return Torch(
        version=version,
        cuda_build=cuda,
        hip_build=hip,
        cuda_available=answers[0],
        mps_built=answers[1],
        mps_available=answers[2],
        error="" if said and said.status == 0 else "it could not be imported in time",
    )


def version_field(text: str, name: str) -> str | None:
    """One value of torch/version.py: `cuda: Optional[str] = '12.8'`."""
    match = re.search(rf"^{name}(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]*)['\"]", text, re.M)
    return match[1] if match and match[1] else None


def answered(text: str) -> tuple[bool | None, bool | None, bool | None]:
    try:
        return checked.decode(text.strip().splitlines()[-1], tuple[bool, bool, bool])
    except (msgspec.MsgspecError, IndexError):
        return None, None, None


def gpus(system: System) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    said = system.run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if said is not None and said.status == 0:
        for line in said.out.splitlines():
            name, _, driver = line.partition(",")
            if name.strip():
                found.append(Gpu(vendor="nvidia", name=name.strip(), driver=driver.strip(), how="nvidia-smi"))
    elif (text := system.read("/proc/driver/nvidia/version")) is not None:
        match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text)
        found.append(
            Gpu(vendor="nvidia", driver=match[1] if match else "", how="/proc/driver/nvidia/version is there")
        )
    # Nearly every AMD processor has a small GPU with this driver: only ROCm says that it is meant to be used.
    if system.platform == "linux" and system.exists("/dev/kfd") and system.exists("/opt/rocm"):
        found.append(Gpu(vendor="amd", name="an AMD GPU", how="/dev/kfd and /opt/rocm are there"))
    return tuple(found)


def power(system: System) -> Power:
    plugged, percent, how = None, None, ""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):
        battery = None
    if battery is not None:
        plugged, percent, how = battery.power_plugged, float(battery.percent), "the battery's own word"
    sleeps, source = sleeps_after(system)
    return Power(
        on_battery=None if plugged is None else not plugged,
        percent=percent,
        sleeps_after_s=sleeps,
        how="; ".join(part for part in (how, source) if part),
    )


def sleeps_after(system: System) -> tuple[float | None, str]:
    """Idle seconds until the system sleeps by itself on mains power, and the source of that setting."""
    if system.platform == "darwin":
        said = system.run("pmset", "-g")
        match = re.search(r"^\s*sleep\s+(\d+)(.*)$", said.out if said else "", re.M)
        if match is None:
            return None, ""
        held = "sleep prevented by" in match[2]
        return (0.0 if held else int(match[1]) * 60.0), "pmset -g"
    if system.platform == "win32":
        said = system.run("powercfg", "/q", "SCHEME_CURRENT", "SUB_SLEEP", "STANDBYIDLE")
        match = re.search(r"Current AC Power Setting Index:\s*0x([0-9a-f]+)", said.out if said else "", re.I)
        return (float(int(match[1], 16)), "powercfg /q") if match else (None, "")
    if not system.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return None, ""
    schema = ("gsettings", "get", "org.gnome.settings-daemon.plugins.power")
    kind = system.run(*schema, "sleep-inactive-ac-type")
    after = system.run(*schema, "sleep-inactive-ac-timeout")
    if kind is None or after is None or kind.status or after.status:
        return None, ""
    digits = after.out.strip()
    sleeps = "suspend" in kind.out or "hibernate" in kind.out
    return (float(digits) if sleeps and digits.isdigit() else 0.0), "gsettings sleep-inactive-ac"


def is_translated(system: System) -> bool:
    if system.platform != "darwin":
        return False
    said = system.run("sysctl", "-n", "sysctl.proc_translated")
    return said is not None and said.out.strip() == "1"


def is_wsl(system: System) -> bool:
    return system.platform == "linux" and "microsoft" in (system.read("/proc/sys/kernel/osrelease") or "").lower()


def system_words(system: System) -> str:
    if system.platform == "darwin":
        said = system.run("sw_vers", "-productVersion")
        return f"macOS {said.out.strip()}" if said else "macOS"
    if system.platform == "linux":
        match = re.search(r'^PRETTY_NAME="?([^"\n]+)', system.read("/etc/os-release") or "", re.M)
        return match[1] if match else f"Linux {os.uname().release}"
    return system.platform
