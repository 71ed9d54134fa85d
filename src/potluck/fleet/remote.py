"""The launcher's end of the connection to one machine: starts the agent there and speaks with it.

One process (ssh, or Python on this machine) carries everything: facts, files, commands, their output, and a
heartbeat every second. So each machine needs only one connection, without a control socket.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import itertools
import json
import re
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Unpack, cast

import msgspec

from potluck import checked
from potluck.fleet import agent
from potluck.fleet.interface import GuestEnd
from potluck.fleet.local import end_words
from potluck.spec.agent_reports import AgentAnswer, RemoteFacts

BEAT_S = 1.0
SILENT_S = 8.0
"""A machine that has not answered a heartbeat for this long is lost. Its agent ends sooner."""
_TOKEN = re.compile(r"(potluck\d{1,3}-)[A-Za-z0-9_-]{20,}")
_UNPACKS = "import sys,zlib,base64,json;exec(zlib.decompress(base64.b64decode(sys.argv[1])));"
_CALLS = "sys.exit(main(json.loads(base64.b64decode(sys.argv[2]))))"


def words_of(module: ModuleType, argument: Mapping[str, Any]) -> list[str]:
    """Arguments for `python` that run a module's `main(argument)` on a machine where the module is not installed.

    They contain no quotes, backslashes or blanks, except in one program that no shell changes.
    """
    source = base64.b64encode(zlib.compress(inspect.getsource(module).encode(), 9)).decode()
    return ["-c", _UNPACKS + _CALLS, source, base64.b64encode(json.dumps(argument).encode()).decode()]


def redacted(text: str) -> str:
    """The text without tokens."""
    return _TOKEN.sub(r"\1…", text)


class RemoteTask:
    """One command on a machine."""

    def __init__(self, link: AgentLink, number: int, log: Path) -> None:
        self._link, self._number, self._log = link, number, log
        self._ended = threading.Event()
        self._end: GuestEnd | None = None
        self.started = threading.Event()
        self.pid: int | None = None
        self.found = threading.Event()
        """Set when `run` and `token` are known, and at the end."""
        self.run, self.token = "", ""
        self.shown = threading.Event()
        """Set when it has printed a token, which no log holds, and at the end."""
        self.shown_token = ""

    def wait(self, timeout_s: float) -> GuestEnd | None:
        return self._end if self._ended.wait(max(0.0, timeout_s)) else None

    def end(self, patience_s: float = 2.0) -> GuestEnd:
        self._link.send({"do": "end", "id": self._number, "patience_s": patience_s})
        return self.wait(patience_s + 8.0) or GuestEnd(None, "it does not answer")

    def feed(self, text: str) -> None:
        """Write to its stdin."""
        self._link.send({"do": "feed", "id": self._number, "text": text})

    def signal(self, number: int) -> None:
        self._link.send({"do": "signal", "id": self._number, "number": number})

    def hear(self, answer: AgentAnswer) -> None:
        """Process the agent's answer about this command."""
        if answer.line is not None:
            if not self.shown_token and (found := _TOKEN.search(answer.line)):
                self.shown_token = found[0]
                self.shown.set()
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(redacted(answer.line) + "\n")
        if answer.pid is not None:
            self.pid = answer.pid
            self.started.set()
        if answer.token:
            self.run, self.token = answer.run, answer.token
            self.found.set()
        if answer.status is not None:
            self.over(GuestEnd(answer.status, end_words(answer.status, self._log)))

    def over(self, end: GuestEnd) -> None:
        if self._end is None:
            self._end = end
        for event in (self._ended, self.found, self.shown, self.started):
            event.set()


class AgentLink:
    """The connection to one machine, from `greet` to `close`. Safe to use from any thread."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tasks: dict[int, RemoteTask] = {}
        self._closed = threading.Event()
        self.lost = threading.Event()
        """Set when the connection has ended in any way."""
        self.facts: RemoteFacts | None = None
        self.noise: list[str] = []
        """Output before the agent's first line, such as a shell's banner."""
        self._greeted = threading.Event()
        self._heard = time.monotonic()
        self._said: deque[str] = deque(maxlen=40)
        parts = {"read": self._read, "errors": self._read_errors, "beat": self._beat}
        self._threads = [
            threading.Thread(target=target, name=f"potluck-{part}-{name}", daemon=True)
            for part, target in parts.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def said(self) -> str:
        """ssh's output on stderr."""
        return "\n".join(self._said)

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def greet(self, timeout_s: float) -> RemoteFacts | None:
        """The machine's facts; None if the agent did not start, with the reason in `status`, `said` and `noise`."""
        if not self._greeted.wait(timeout_s):
            self._process.kill()
        if self.facts is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)
            self._threads[1].join(1.0)
        return self.facts

    def put(self, path: str, data: bytes, log: Path, timeout_s: float = 120.0) -> GuestEnd:
        task = self._task(log)
        self.send({"do": "put", "id": task._number, "path": path, "size": len(data)}, data)
        return task.wait(timeout_s) or GuestEnd(None, f"{path} was not written after {timeout_s:.0f} s")

    def run(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        **more: Unpack[agent.CommandOptions],
    ) -> RemoteTask:
        """Start a command."""
        task = self._task(log)
        request = {"do": "run", "id": task._number, "argv": list(argv), "env": dict(env), **more}
        self.send(cast(agent.AgentRequest, request))
        task.started.wait(20.0)
        return task

    def _task(self, log: Path) -> RemoteTask:
        log.touch()
        task = RemoteTask(self, next(self._numbers), log)
        self._tasks[task._number] = task
        if self.lost.is_set():
            task.over(self._loss())
        return task

    def send(self, message: agent.AgentRequest, data: bytes = b"") -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):  # a lost connection is noticed by the reader
            self._process.stdin.write(json.dumps(message).encode() + b"\n" + data)
            self._process.stdin.flush()

    def close(self, patience_s: float = 5.0) -> None:
        """Disconnect from the machine: the agent ends everything that it has started."""
        self._closed.set()
        if self.facts is None:
            self._process.kill()  # nothing has been started there
        assert self._process.stdin is not None
        if self._lock.acquire(timeout=1.0):
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._lock.release()
        else:
            self._process.kill()  # a writer waits for a machine that is gone
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(2.0)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    # -- threads ----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S) and not self.lost.is_set():
            self.send({"do": "beat"})
            if self.facts is not None and time.monotonic() - self._heard > SILENT_S:
                self._said.append(f"nothing came for {SILENT_S:.0f} s")
                self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for raw in self._process.stdout:
                self._hear(raw.decode(errors="replace").rstrip("\r\n"))
        self.lost.set()
        for task in list(self._tasks.values()):
            task.over(self._loss())
        self._greeted.set()

    def _hear(self, line: str) -> None:
        self._heard = time.monotonic()
        if self.facts is None:
            before, hello, rest = line.partition(agent.HELLO)
            if before.strip() and len(self.noise) < 100:
                self.noise.append(before)
            if hello:
                with contextlib.suppress(msgspec.DecodeError):
                    self.facts = checked.decode(rest, RemoteFacts)
                self._greeted.set()
            return
        try:
            answer = checked.decode(line, AgentAnswer)
        except msgspec.DecodeError:
            return  # not the agent's: something that it started wrote to the same stream
        if answer.id is not None and (task := self._tasks.get(answer.id)) is not None:
            task.hear(answer)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for raw in self._process.stderr:
                self._said.append(raw.decode(errors="replace").rstrip("\r\n"))

    def _loss(self) -> GuestEnd:
        deadline = time.monotonic() + 1.0
        while not self._said and time.monotonic() < deadline and self._threads[1].is_alive():
            time.sleep(0.02)
        words = "" if self._closed.is_set() else (f": {self._said[-1]}" if self._said else "")
        return GuestEnd(None, f"the connection to {self.name} was closed{words}")
