"""The POTLUCK_* environment variables: their names, their values, and the errors for invalid ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from potluck import checked
from potluck.bounds import Text
from potluck.checked import did_you_mean
from potluck.errors import ConfigError

PREFIX = "POTLUCK_"

DIST_VARIABLES: Mapping[str, str] = {
    "POTLUCK_DIST_TRANSPORT": "torch.distributed: auto, tcp, or shm for ranks that are all on one machine",
    "POTLUCK_DIST_ADDRESS": "torch.distributed: the address of this machine to listen at",
    "POTLUCK_DIST_INTERFACE": "torch.distributed: the network interface to listen at, for example eth0",
    "POTLUCK_DIST_PORT_BASE": "torch.distributed: rank r listens at this port + r; 0 takes any free port",
    "POTLUCK_DIST_CHUNK_BYTES": "torch.distributed: how much is sent at once, for example 512KiB",
    "POTLUCK_DIST_SMALL_BYTES": "torch.distributed: up to this size a collective is optimized for latency",
    "POTLUCK_DIST_ALGORITHM": "torch.distributed: auto, direct, owners or ring for a large all-reduce",
    "POTLUCK_DIST_COMPRESSION": "torch.distributed: none, fp16, bf16, int8, int4, topk or topk:0.01 for all-reduce",
    "POTLUCK_DIST_CHECKSUM": "torch.distributed: 1 checks every chunk that arrives, 0 does not",
    "POTLUCK_DIST_ENCRYPTION": "torch.distributed: 1 encrypts between machines, 0 does not",
    "POTLUCK_DIST_COPY_THREADS": "torch.distributed: threads that copy within a machine; 0: one per core",
    "POTLUCK_DIST_TIMEOUT_S": "torch.distributed: seconds for a collective, instead of the group's own timeout",
    "POTLUCK_DIST_CONNECT_TIMEOUT_S": "torch.distributed: seconds for all ranks to reach each other",
    "POTLUCK_DIST_HEARTBEAT_S": "torch.distributed: seconds between two heartbeats",
    "POTLUCK_DIST_HEARTBEAT_TIMEOUT_S": "torch.distributed: a rank counts as gone after this many silent seconds",
    "POTLUCK_DIST_LOG_LEVEL": "torch.distributed: debug, info, warning or error",
}
"""`dist/config.py` reads and checks their values."""

VARIABLES: Mapping[str, str] = {
    "POTLUCK_TOKEN": "the token that `potluck join` uses when none is typed",
    "POTLUCK_DEVICE": "the device to compute on: cpu, cuda, cuda:1, mps",
    "POTLUCK_THREADS": "how many CPU threads to compute with, a whole number from 1",
    "POTLUCK_RUNS": "the folder that holds run folders",
    "POTLUCK_DEBUG": "1 shows tracebacks, 0 does not",
    "POTLUCK_NAME": "this machine's name, as the other machines see it",
    "POTLUCK_TRACE": "a file that gets a line for every interval in which this process computed",
    "POTLUCK_FAILPOINT": "for tests of Potluck itself: fail at a named moment, NAME=ACTION[@COUNT]",
    **DIST_VARIABLES,
}

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Environment(Struct, frozen=True, kw_only=True, rename=lambda name: PREFIX + name.upper()):
    """The values from the environment; None if unset."""

    token: Text | None = None
    """A secret: never shown, never logged."""
    device: Text | None = None
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    runs: Path | None = None
    debug: bool = False
    name: Annotated[str, Meta(max_length=64)] | None = None
    trace: Path | None = None
    failpoint: Text | None = None
    """`failpoints` checks whether it names one that exists."""

    def __post_init__(self) -> None:
        if any(not c.isprintable() or c.isspace() for c in self.token or ""):
            # The value is a secret, so the message does not repeat it.
            raise ConfigError(
                "POTLUCK_TOKEN holds blanks or control characters, so it is no token",
                hint="copy the token again from the host's `potluck join ...` line, as one word",
            )
        if any(not c.isprintable() or c.isspace() for c in self.device or ""):
            raise _wrong("POTLUCK_DEVICE", self.device, "use one word such as cpu, cuda, cuda:1 or mps")
        if not (self.name or "").isprintable():
            raise _wrong("POTLUCK_NAME", self.name, "use printable characters")
        if self.runs is not None and self.runs.exists() and not self.runs.is_dir():
            raise _wrong("POTLUCK_RUNS", self.runs, "this is a file; name a folder (it is made when missing)")
        if self.trace is not None and self.trace.is_dir():
            raise _wrong("POTLUCK_TRACE", self.trace, "this is a folder; name a file (it is made when missing)")
        if self.trace is not None and not self.trace.parent.is_dir():
            raise _wrong("POTLUCK_TRACE", self.trace, f"there is no folder {self.trace.parent}; make it first")

    def __repr__(self) -> str:
        return f"Environment({', '.join(name for name in self.__struct_fields__ if getattr(self, name))})"


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check every POTLUCK_* variable; an empty one counts as not set."""
    environ = os.environ if environ is None else environ
    check_names(environ)
    given: dict[str, str | bool] = {name: text for name in VARIABLES if (text := environ.get(name, "").strip())}
    if (debug := str(given.get("POTLUCK_DEBUG", "0")).lower()) in _FLAGS:
        given["POTLUCK_DEBUG"] = _FLAGS[debug]
    return checked.convert(given, Environment, strict=False)


def check_names(environ: Mapping[str, str]) -> None:
    """Refuse a POTLUCK_* variable that does not exist, with the nearest name that does."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            # The prefix, which all have in common, would make all of them similar.
            ends = {known.removeprefix(PREFIX): f"{known} ({text})" for known, text in VARIABLES.items()}
            near = did_you_mean(name.removeprefix(PREFIX), ends, ends)
            hint = near.strip() or "the variables that exist: " + ", ".join(VARIABLES)
            raise ConfigError(f"unknown environment variable {name}", hint=hint)


def machine_name(given: str | None, environment: Environment) -> str:
    """This machine's name in a run: as given, else from its variable, else the host name."""
    import socket  # not for `--help`

    return given or environment.name or socket.gethostname().split(".")[0] or "machine"


def runs_folder(given: Path | None, environment: Environment) -> Path:
    """The folder of run folders: as given, else from its variable, else `runs`."""
    return given or environment.runs or Path("runs")


def _wrong(name: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"{name}={str(value)!r} is not valid", hint=hint)
