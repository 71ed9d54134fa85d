"""Guests on this very machine: started as processes of their own, and never left behind.

Owns their life. They get the token through their environment, not their command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from potluck.spec.config import RunConfig

HOSTS_OWN = ("POTLUCK_TRACE", "POTLUCK_FAILPOINT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that are about the host's process, not about its guests'."""


class LocalGuests:
    """Started together, ended together; their output lies in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int, *, token: str, threads: int, config: RunConfig) -> None:
        for number in range(1, count + 1):
            command = [sys.executable, "-m", "potluck", "join", "--name", f"guest-{number}"]
            command += ["--threads", str(threads), "--parent", str(os.getpid()), "--view", "plain"]
            command += ["--runs", str(self._folder)]
            if config.device:
                command += ["--device", config.device]
            if config.micro_batch:
                command += ["--micro-batch", str(config.micro_batch)]
            environment = {**os.environ, "POTLUCK_TOKEN": token}
            for name in HOSTS_OWN:
                environment.pop(name, None)
            with open(self._folder / f"guest-{number}.log", "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        # Nothing is ever said: that this end is gone tells them that the host is, however it went.
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C is for the host: it saves first and then sends its guests home.
                        start_new_session=os.name == "posix",
                    )
                )

    def close(self, patience_s: float = 5.0) -> list[str]:
        """Wait for them to go home, kill whoever has not by then; what went wrong with any, in words."""
        began = time.monotonic()
        failed = []
        for number, process in enumerate(self._processes, 1):
            status = _waited(process, began + patience_s / 3)
            assert process.stdin is not None
            process.stdin.close()
            if status is None:
                # It never got in, or did not hear the goodbye: now it sees that this end is closed.
                if _waited(process, began + patience_s) is None:
                    process.kill()
                    process.wait()
                continue
            if status:
                log = self._folder / f"guest-{number}.log"
                tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
                failed.append(f"guest-{number} ended with status {status}: {tail} (see {log})")
        self._processes.clear()
        return failed


def _waited(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit status, or None when it has not ended by then."""
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
