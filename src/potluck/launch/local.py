"""Guests on this very machine: started as processes of their own, and never left behind.

Owns their life. They get the token through their environment, not their command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from potluck.errors import PotluckError


class LocalGuests:
    """Started together, ended together; their output lies in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int, *, token: str, threads: int, device: str | None = None) -> None:
        for number in range(1, count + 1):
            command = [sys.executable, "-m", "potluck", "join", "--name", f"guest-{number}"]
            command += ["--threads", str(threads), "--parent", str(os.getpid()), "--view", "plain"]
            if device:
                command += ["--device", device]
            environment = {**os.environ, "POTLUCK_TOKEN": token}
            with open(self._folder / f"guest-{number}.log", "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C is for the host: it saves first and then sends its guests home.
                        start_new_session=os.name == "posix",
                    )
                )

    def check(self) -> None:
        """Raise if a guest has failed, with the end of what it said."""
        for number, process in enumerate(self._processes, 1):
            if process.poll() not in (None, 0):
                log = self._folder / f"guest-{number}.log"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise PotluckError(f"guest-{number} ended with status {process.returncode}: {tail}")

    def close(self, patience_s: float = 5.0) -> None:
        """Wait for them to go home; whoever has not by then is killed."""
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
