"""fleet.toml: the machines of a fleet, and how to connect to each. PURE.

    host = "desk"                          # optional: where the host runs (default: here)
    [[machine]]
    ssh = "old@laptop"                     # as for `ssh`: a name of ~/.ssh/config, or user@address
    name = "laptop"                        # optional, as the rest
    python = "/home/old/.venv/bin/python"
"""

from __future__ import annotations

from msgspec import Struct

from potluck.bounds import Many, Positive, Text
from potluck.errors import ConfigError

CACHE = "~/.cache/potluck"
EXAMPLE = 'write it like this: [[machine]] and below it ssh = "you@192.168.1.7"'


class NamedMachine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine and how to connect to it."""

    ssh: Text = ""
    """As for `ssh`; empty for this machine."""
    name: Text = ""
    """Name in logs and tables; made from `ssh` if not given."""
    python: Text = ""
    """The interpreter to use there; if it has all that Potluck needs, nothing is installed."""
    cache: Text = CACHE
    """Folder there for Potluck and its environments."""
    folder: Text = ""
    """Working folder there, if the host runs there."""
    device: Text | None = None
    threads: Positive | None = None
    micro_batch: Positive | None = None
    slots: Positive = 1
    """Guests to start, one per GPU; at most as many as there are GPUs."""

    def __post_init__(self) -> None:
        # ssh takes what begins with a dash for an option.
        if self.ssh.startswith("-") or any(c.isspace() for c in self.ssh):
            raise ConfigError(f"ssh = {self.ssh!r} is not the name of a machine", hint=EXAMPLE)


class FleetFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines, and which one is the host."""

    machine: Many[NamedMachine] = ()
    host: Text = ""
    """Name of the machine that hosts; empty: this machine, which is not in the list."""
