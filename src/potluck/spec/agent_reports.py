"""The reports of a launcher's agent about its machine and the commands that it runs."""

from __future__ import annotations

from msgspec import Struct

from potluck.bounds import Finite, Many, Natural, Text, Whole


class RemoteFacts(Struct, frozen=True, kw_only=True):
    """The first answer of a launcher's agent on a machine."""

    pid: Natural
    python: Text
    executable: Text
    platform: Text
    architecture: Text
    bits: Natural
    clock_s: Finite
    cores: Natural
    uv: Text
    """Path of the program uv; empty if there is none."""
    venv: bool
    """Whether Python can make environments with pip in them."""
    lacks: Many[Text]
    """Requirements that this interpreter itself does not have, or has too old."""
    code: bool
    """Whether this Potluck has been unpacked there."""
    env: Text
    """Folder of the environment for these requirements and this Python."""
    ready: bool
    """Whether that environment is complete."""
    gpus: Natural
    wsl: bool
    cache: Text
    free_bytes: Natural
    noexec: bool
    """Whether files of the cache's file system may not be executed."""
    pythonpath: Text = ""
    """The variable PYTHONPATH there, with which `lacks` was found."""
    box: Text = ""
    """The same for all names of one machine, also for containers on it."""
    write_error: Text = ""
    """Why nothing can be written to the cache; empty if it can."""


class AgentAnswer(Struct, frozen=True, kw_only=True):
    """Every later line: one fact about a command, or a sign of life that has no `id`."""

    id: Natural | None = None
    """The command's number, which the launcher chose."""
    pid: Natural | None = None
    line: Text | None = None
    """A line of its output."""
    run: Text = ""
    """The run folder that it trains in."""
    token: Text = ""
    """The token of that run."""
    status: Whole | None = None
    """Its exit status, once it has ended. Negative: ended by this signal."""
