"""Installs this Potluck and its requirements on a machine, without root, in a folder named by versions.

Potluck's own files are sent as a wheel made from the files that run here, from a checkout or an installed package.
It is unpacked next to the environment, which contains torch and the other requirements: after a change of Potluck
only the wheel, half a megabyte, is sent again.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import io
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck._version import __version__
from potluck.errors import ConfigError
from potluck.fleet import installer
from potluck.fleet.agent import AgentWants
from potluck.fleet.installer import InstallPlan
from potluck.fleet.remote import words_of
from potluck.spec.agent_reports import RemoteFacts
from potluck.spec.fleet_file import NamedMachine

MODULES = ("torch", "numpy", "zmq", "rich", "psutil", "safetensors", "click", "msgspec")
"""The modules that Potluck imports from its requirements."""
PACKAGE = Path(__file__).parents[1]
_NOT_SENT = (".pyc", ".pyi", ".so")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?\s*(?:[(]?>=\s*([0-9.]+))?")
_THEN = (2020, 1, 1, 0, 0, 0)
"""The date of every file in the wheel, so that the same files give the same wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNeeds:
    """The requirements of every machine of a fleet."""

    extra: tuple[str, ...] = ()
    """Requirements besides Potluck's own, as for pip (`--with`)."""
    imports: Mapping[str, str]
    """Modules that the script imports, each with its package."""

    @property
    def requirements(self) -> list[str]:
        return [*needs(), *self.extra]

    @property
    def pins(self) -> list[str]:
        """The versions of the requirements that are installed here."""
        found = []
        for requirement in self.requirements:
            name = name_of(requirement)
            try:
                found.append(f"{name}=={importlib.metadata.version(name).partition('+')[0]}")
            except importlib.metadata.PackageNotFoundError:
                continue  # only that machine needs it
        return found

    def of(self, machine: NamedMachine) -> AgentWants:
        """The agent's argument: what to check on that machine."""
        names = "\n".join([*self.requirements, *self.pins])
        return {
            "cache": machine.cache,
            "code": code_name(),
            "env": f"env-{hashlib.sha256(names.encode()).hexdigest()[:12]}",
            "needs": {name_of(r): _least(r) for r in self.requirements},
        }


def needs() -> list[str]:
    """Potluck's own requirements, without extras."""
    return [r.split(";")[0].strip() for r in importlib.metadata.requires("potluck") or () if "extra ==" not in r]


def name_of(requirement: str) -> str:
    match = _REQUIREMENT.match(requirement.strip())
    if match is None:
        raise ConfigError(
            f"--with {requirement!r} is not the name of a package", hint="for example --with transformers,peft"
        )
    return match[1]


def _least(requirement: str) -> str:
    match = _REQUIREMENT.match(requirement.strip())
    return (match[3] if match else None) or "0"


@functools.cache
def _files() -> dict[str, bytes]:
    """The contents of the wheel."""
    files = {
        f"potluck/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix not in _NOT_SENT and "__pycache__" not in path.parts and path.is_file()
    }
    files["_potluck_torch.py"] = _torch_hook().read_bytes()
    about = importlib.metadata.distribution("potluck")
    info = f"potluck-{__version__}.dist-info"
    files[f"{info}/METADATA"] = (about.read_text("METADATA") or f"Name: potluck\nVersion: {__version__}\n").encode()
    files[f"{info}/entry_points.txt"] = (about.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: potluck\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    return files


@functools.cache
def wheel() -> bytes:
    """This Potluck as a wheel, made from the files that run here."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in _files().items():
            item = zipfile.ZipInfo(name, _THEN)
            item.compress_type = zipfile.ZIP_DEFLATED
            item.external_attr = 0o644 << 16
            whole.writestr(item, content)
    return packed.getvalue()


def _torch_hook() -> Path:
    """torch finds Potluck's backend by this module, which is installed beside the package."""
    import _potluck_torch

    return Path(_potluck_torch.__file__ or PACKAGE.parent / "_potluck_torch.py")


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def code_name() -> str:
    """The folder of this Potluck in a machine's cache. A change of any file gives another folder."""
    record = _files()[f"potluck-{__version__}.dist-info/RECORD"]
    return f"potluck-{__version__}-{hashlib.sha256(record).hexdigest()[:12]}"


def install_words(facts: RemoteFacts, wanted: FleetNeeds, *, make_env: bool) -> list[str]:
    """The command that installs on a machine with these facts."""
    plan: InstallPlan = {
        "cache": facts.cache,
        "code": code_name(),
        "env": facts.env,
        "make_env": make_env,
        "uv": facts.uv,
        "requirements": wanted.requirements,
        "pins": wanted.pins,
        "modules": list(MODULES),
    }
    return [facts.executable, *words_of(installer, plan)]


def variables(facts: RemoteFacts, *, own: bool) -> dict[str, str]:
    """The environment variables with which Potluck is found on a machine. The machine's own interpreter keeps its
    PYTHONPATH."""
    path = [f"{facts.cache}/{code_name()}", *([facts.pythonpath] if own and facts.pythonpath else [])]
    return {"PYTHONPATH": ":".join(path), "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}


def variables_here() -> dict[str, str]:
    """The same on this machine, where Potluck is not unpacked."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def missing_words(python: str, modules: Sequence[str]) -> list[str]:
    """A command that prints those of the modules that an interpreter does not find, one in a line."""
    program = "import sys,importlib.util as u\nfor m in sys.argv[1:]:\n    u.find_spec(m) or print('missing', m)"
    return [python, "-c", program, *modules]
