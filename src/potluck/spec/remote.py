"""What a launcher's agent says of the machine on which it runs, and of the commands there."""

from __future__ import annotations

from msgspec import Struct

from potluck.checked import Natural


class RemoteFacts(Struct, frozen=True, kw_only=True):
    """The first answer of a launcher's agent on a machine."""

    pid: Natural
    python: str
    executable: str
    platform: str
    architecture: str
    bits: int
    clock_s: float
    cores: Natural
    uv: str
    """Path of the program uv; empty if there is none."""
    venv: bool
    """Whether Python can make environments with pip in them."""
    lacks: tuple[str, ...]
    """Requirements that this interpreter itself does not have, or has too old."""
    code: bool
    """Whether this Potluck has been unpacked there."""
    env: str
    """Folder of the environment for these requirements and this Python."""
    ready: bool
    """Whether that environment is complete."""
    gpus: Natural
    wsl: bool
    cache: str
    free_bytes: Natural
    noexec: bool
    """Whether files of the cache's file system may not be executed."""
    pythonpath: str = ""
    """The variable PYTHONPATH there, with which `lacks` was found."""
    box: str = ""
    """The same for all names of one machine, also for containers on it."""
    write_error: str = ""
    """Why nothing can be written to the cache; empty if it can."""


class AgentAnswer(Struct, frozen=True, kw_only=True):
    """Every later line: one fact about a command, or a sign of life that has no `id`."""

    id: int | None = None
    """The command's number, which the launcher chose."""
    pid: Natural | None = None
    line: str | None = None
    """Of its output."""
    run: str = ""
    """The run folder that it trains in."""
    token: str = ""
    """That run's."""
    status: int | None = None
    """It has ended. Negative: by this signal."""
