"""The interface of an emulated fleet; `namespaces.py` and `loopback.py` implement it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from potluck.lab.shaping import Fault


class Box(Protocol):
    """A running rig. Leaving the `with` block takes it down and ends everything that still runs on it."""

    kind: str
    """A description: "network namespaces" or "loopback"."""
    peers_connect: bool
    """Whether any two machines can connect to each other directly (torch.distributed needs it)."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def address(self, machine: str) -> str:
        """The address that the machine can bind and the others reach."""

    def start(
        self, machine: str, command: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on a machine, `env` its whole environment, its output into `log`.

        It dies with this process, even by kill -9. Call it from a thread that lives as long as the command.
        """

    def traffic(self, machine: str) -> tuple[int, int]:
        """Bytes that have crossed the machine's own link so far: (sent, received)."""

    def token_file(self, machine: str, host_token: Path) -> Path:
        """The token with which this machine reaches the host: the host's own, or one for a proxy."""

    def add_faults(self, machine: str, faults: Sequence[Fault]) -> None:
        """Put faults on a guest's link, their times counted from now.

        They affect connections with a token from `token_file`. Where the kernel shapes the links, the box must have
        been made with `detours`.
        """
