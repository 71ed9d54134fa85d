"""The POTLUCK_* environment variables: their names, their values, and what to say when one is wrong.

It knows nothing of what the values are used for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from potluck.errors import ConfigError

PREFIX = "POTLUCK_"

DIST_VARIABLES: Mapping[str, str] = {
    "POTLUCK_DIST_TRANSPORT": "torch.distributed: auto, tcp, or shm for ranks that are all on one machine",
    "POTLUCK_DIST_ADDRESS": "torch.distributed: the address of this machine to listen at",
    "POTLUCK_DIST_INTERFACE": "torch.distributed: the network interface to listen at, for example eth0",
    "POTLUCK_DIST_PORT_BASE": "torch.distributed: rank r listens at this port + r; 0 takes any free port",
    "POTLUCK_DIST_CHUNK_BYTES": "torch.distributed: how much is sent at once, for example 512KiB",
    "POTLUCK_DIST_SMALL_BYTES": "torch.distributed: up to this size a collective is made for latency",
    "POTLUCK_DIST_ALGORITHM": "torch.distributed: auto, direct, owners or ring for a large all-reduce",
    "POTLUCK_DIST_COMPRESSION": "torch.distributed: none, fp16, bf16, int8, int4, topk or topk:0.01 for all-reduce",
    "POTLUCK_DIST_CHECKSUM": "torch.distributed: 1 checks every chunk that arrives, 0 does not",
    "POTLUCK_DIST_ENCRYPTION": "torch.distributed: 0 sends in the clear between machines, 1 does not",
    "POTLUCK_DIST_COPY_THREADS": "torch.distributed: threads that copy within a machine; 0: as there are cores",
    "POTLUCK_DIST_TIMEOUT_S": "torch.distributed: seconds for a collective, instead of the group's own timeout",
    "POTLUCK_DIST_CONNECT_TIMEOUT_S": "torch.distributed: seconds for all ranks to reach each other",
    "POTLUCK_DIST_HEARTBEAT_S": "torch.distributed: seconds between two signs of life",
    "POTLUCK_DIST_HEARTBEAT_TIMEOUT_S": "torch.distributed: a rank is gone after so many silent seconds",
    "POTLUCK_DIST_LOG_LEVEL": "torch.distributed: debug, info, warning or error",
}
"""What their values mean is for `dist/config.py` to say."""

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

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
_MAX_NAME = 64
_MAX_THREADS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says; None where it says nothing."""

    token: str | None = field(default=None, repr=False)
    """A secret: never shown, never logged."""
    device: str | None = None
    threads: int | None = None
    runs: Path | None = None
    debug: bool = False
    name: str | None = None
    trace: Path | None = None
    failpoint: str | None = None
    """Whether it names a failpoint that exists is for `failpoints` to say."""


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check every POTLUCK_* variable; an empty one counts as not set."""
    environ = os.environ if environ is None else environ
    check_names(environ)
    given = {name: environ.get(name, "").strip() for name in VARIABLES}
    return Environment(
        token=_token(given["POTLUCK_TOKEN"]),
        device=_device(given["POTLUCK_DEVICE"]),
        threads=_threads(given["POTLUCK_THREADS"]),
        runs=_runs(given["POTLUCK_RUNS"]),
        debug=_flag("POTLUCK_DEBUG", given["POTLUCK_DEBUG"]),
        name=_name(given["POTLUCK_NAME"]),
        trace=_trace(given["POTLUCK_TRACE"]),
        failpoint=given["POTLUCK_FAILPOINT"] or None,
    )


def check_names(environ: Mapping[str, str]) -> None:
    """Refuse a POTLUCK_* variable that does not exist, with the nearest name that does."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    import difflib  # slow to import, and only needed here

    # Without the prefix, which all have in common.
    ends = [known.removeprefix(PREFIX) for known in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {PREFIX}{close[0]} ({VARIABLES[PREFIX + close[0]]})?"
    else:
        hint = "the variables that exist: " + ", ".join(VARIABLES)
    return ConfigError(f"unknown environment variable {name}", hint=hint)


def _wrong(name: str, value: str, hint: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not valid", hint=hint)


def _token(value: str) -> str | None:
    if any(not c.isprintable() or c.isspace() for c in value):
        # The value is a secret, so the message does not repeat it.
        raise ConfigError(
            "POTLUCK_TOKEN holds blanks or control characters, so it is no token",
            hint="copy the token again from the host's `potluck join ...` line, as one word",
        )
    return value or None


def _device(value: str) -> str | None:
    if any(not c.isprintable() or c.isspace() for c in value):
        raise _wrong("POTLUCK_DEVICE", value, "use one word such as cpu, cuda, cuda:1 or mps")
    return value or None


def _threads(value: str) -> int | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 6 and 1 <= int(value) <= _MAX_THREADS):
        raise _wrong("POTLUCK_THREADS", value, f"use a whole number from 1 to {_MAX_THREADS}")
    return int(value)


def _runs(value: str) -> Path | None:
    if not value:
        return None
    path = Path(value).expanduser()
    if path.exists() and not path.is_dir():
        raise _wrong("POTLUCK_RUNS", value, "this is a file; name a folder (it is made when missing)")
    return path


def _flag(name: str, value: str) -> bool:
    if value.lower() in _YES:
        return True
    if not value or value.lower() in _NO:
        return False
    raise _wrong(name, value, "use 1 or 0")


def _name(value: str) -> str | None:
    if len(value) > _MAX_NAME or not value.isprintable():
        raise _wrong("POTLUCK_NAME", value, f"use at most {_MAX_NAME} printable characters")
    return value or None


def _trace(value: str) -> Path | None:
    if not value:
        return None
    path = Path(value).expanduser()
    if path.is_dir():
        raise _wrong("POTLUCK_TRACE", value, "this is a folder; name a file (it is made when missing)")
    if not path.parent.is_dir():
        raise _wrong("POTLUCK_TRACE", value, f"there is no folder {path.parent}; make it first")
    return path
