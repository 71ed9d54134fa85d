"""Access to files, commands and variables of the system, each bounded in time and size.

Tests replace it by recorded answers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_S = 3.0
_MOST_TEXT = 1 << 20
_PATH_END = ":/usr/local/sbin:/usr/sbin:/sbin:/usr/libexec/ApplicationFirewall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The result of a command."""

    status: int
    out: str
    err: str = ""


@dataclass(slots=True, kw_only=True)
class System:
    """This machine. `root` is the folder in which its files are read."""

    platform: str = sys.platform
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self, path: str) -> str | None:
        """A file's text, or None if it cannot be read."""
        try:
            with open(self.root / path.lstrip("/"), encoding="utf-8", errors="replace") as file:
                return file.read(_MOST_TEXT)
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def run(self, *command: str, timeout_s: float = COMMAND_S) -> Said | None:
        """A command's output; None if it is missing or does not end in time."""
        # A user's PATH often lacks the folders of ip, nft and ufw.
        environ = {**self.environ, "PATH": self.environ.get("PATH", os.defpath) + _PATH_END, "LC_ALL": "C"}
        program = shutil.which(command[0], path=environ["PATH"])
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                start_new_session=os.name == "posix",  # no command may ask the terminal for a password
            )
        except (OSError, subprocess.SubprocessError):
            return None
        out, err = (part[:_MOST_TEXT].decode("utf-8", "replace") for part in (done.stdout, done.stderr))
        return Said(status=done.returncode, out=out, err=err)
