"""What the GPU benches share: GPT-2 124M's settings, runs as processes of their own, and what their logs say.

It must not know what any bench measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEQUENCE, GLOBAL_BATCH = 1024, 512
GPT2 = ["--depth", "12", "--sequence", str(SEQUENCE), "--batch-tokens", str(SEQUENCE * GLOBAL_BATCH)]
"""GPT-2 124M, half a million tokens a step."""

Event = dict[str, Any]


@dataclass(slots=True)
class Run:
    """One host with its guests; nothing of it is left after `end`."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Start one process of the run; what it says goes into a file of its name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **(env or {})}
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    list(command),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def host(self, *words: str, command: Sequence[str] = ("-m", "potluck")) -> None:
        """A host of GPT-2 124M that keeps its log here and saves nothing on the way."""
        common = ["--bind", "127.0.0.1", "--name", "host", "--checkpoint-every", "0", "--view", "plain"]
        where = ["--runs", str(self.folder / "runs")]
        self.start("host", [sys.executable, *command, "host", "gpt", *common, *where, *words])

    def guest(self, name: str, token: Path, *words: str) -> None:
        common = ["join", "--token-file", str(token), "--name", name, "--view", "plain", "--wait", "300"]
        self.start(name, [sys.executable, "-m", "potluck", *common, *words])

    def token(self, within_s: float = 90.0) -> Path:
        """The file with the host's token, once it is there."""
        return self.wait(lambda: next(self.folder.glob("runs/*/token"), None), within_s, "token")

    def events(self, kind: str) -> list[Event]:
        found = next(self.folder.glob("runs/*/events.jsonl"), None)
        lines = found.read_text(encoding="utf-8").split("\n")[:-1] if found is not None else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait(self, found: Callable[[], Any], within_s: float, what: str) -> Any:
        """Until `found` says something true; an error with the logs' ends where it does not or a process failed."""
        deadline = time.monotonic() + within_s
        while not (result := found()):
            failed = [p for p in self.processes if p.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                raise RuntimeError(f"{self.folder.name}: no {what} within {within_s:.0f} s\n{self.said()}")
            time.sleep(0.1)
        return result

    def wait_for_steps(self, steps: int, within_s: float) -> list[Event]:
        self.wait(lambda: len(self.events("step")) >= steps, within_s, f"{steps} steps")
        return self.events("step")[:steps]

    def said(self, lines: int = 12) -> str:
        parts = []
        for log in sorted(self.folder.glob("*.log")):
            parts += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()


def mean_step_s(steps: Sequence[Event], skip: int) -> float:
    """Mean over all steps after the first few."""
    counted = steps[skip:]
    return float(sum(event["step_s"] for event in counted)) / len(counted)


def say(words: str) -> None:
    print(words, flush=True)
