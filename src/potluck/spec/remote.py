"""What a launcher is told of a machine that it reached: the facts that decide whether a guest can run there."""

from __future__ import annotations

from msgspec import Struct


class RemoteFacts(Struct, frozen=True, kw_only=True):
    """The first answer of a launcher's agent on a machine."""

    pid: int
    python: str
    executable: str
    platform: str
    architecture: str
    bits: int
    clock_s: float
    cores: int
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
    gpus: int
    wsl: bool
    cache: str
    free_bytes: int
    noexec: bool
    """Whether files of the cache's file system may not be executed."""
    pythonpath: str = ""
    """The variable PYTHONPATH there, with which `lacks` was found."""
    box: str = ""
    """The same for all names of one machine, also for containers on it."""
    write_error: str = ""
    """Why nothing can be written to the cache; empty if it can."""
