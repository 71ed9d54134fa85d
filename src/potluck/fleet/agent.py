"""What a launcher runs on each machine: reports facts, writes files, runs commands, and ends them with its stdin.

It is sent as text to a Python 3.11 or newer on that machine, so it imports only the standard library. Requests are
lines of JSON on stdin, answers are lines of JSON on stdout. The launcher sends something every second. If nothing
arrives for SILENT_S, or stdin ends, the launcher or the connection is gone: the agent ends everything that it has
started, and itself. So a killed launcher, a killed ssh and a pulled cable are handled in the same way.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypedDict

HELLO = "potluck-agent "
AGENT_PID = "{agent}"
"""Placeholder for this process's number in the arguments of a command."""
SILENT_S = 6.0
PATIENCE_S = 2.0
"""Time from the request to leave until a guest is killed. SILENT_S + PATIENCE_S must stay below 10 s."""
_PATHS = ("~/.local/bin", "~/.cargo/bin", "/opt/homebrew/bin", "/usr/local/bin")


class AgentWants(TypedDict):
    """What the launcher plans on this machine: `main`'s argument."""

    cache: str
    code: str
    """Folder of this Potluck in the cache."""
    env: str
    """Name of the environment; the version of Python is added."""
    needs: dict[str, str]
    """The minimum version of each requirement."""


class CommandOptions(TypedDict, total=False):
    """How a command is run."""

    cwd: str
    feed: str
    """Text for its stdin."""
    runs: str
    """Folder in which the command makes its run folder."""
    remove: str
    """Folder to remove at its end."""
    patience_s: float
    """Time from the request to leave until it is killed."""


class AgentRequest(CommandOptions, total=False):
    """A line on stdin. `do` is put, run, signal, feed, beat or end; each has some of the other keys."""

    do: str
    id: int
    """The command's number, which its answers also have."""
    path: str
    size: int
    """Bytes of the file, which follow the line."""
    argv: list[str]
    env: dict[str, str]
    number: int
    """Number of the signal."""
    text: str


def main(wanted: AgentWants) -> None:
    """Report this machine's facts, then serve requests until stdin ends."""
    output, requests = _LauncherLines(), _Requests()
    tasks: dict[int, _Task] = {}
    ending = threading.Lock()

    def end_all() -> None:
        with ending:
            for task in list(tasks.values()):
                task.ask()
            for task in sorted(tasks.values(), key=lambda task: task.patience_s):
                task.end()
            for task in tasks.values():
                task.remove()
            os._exit(0)  # at once: a thread may be in the middle of a line that nobody reads

    def watch() -> None:
        while time.monotonic() - requests.heard < SILENT_S:
            time.sleep(0.2)
        end_all()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(1))
    threading.Thread(target=watch, daemon=True).start()
    try:
        output.say(facts(wanted), HELLO)
        _serve(requests, tasks, output)
    finally:
        end_all()


def _serve(requests: _Requests, tasks: dict[int, _Task], output: _LauncherLines) -> None:
    for request in requests:
        kind, number = request.get("do"), request.get("id", 0)
        try:
            if kind == "put":
                _put(_place(request["path"]), requests.take(request["size"], lambda: output.say({"beat": 1})))
                output.say({"id": number, "status": 0})
            elif kind == "run":
                tasks[number] = _Task(request, output)
            elif kind == "signal" and number in tasks:
                tasks[number].signal(request["number"])
            elif kind == "feed" and number in tasks:
                tasks[number].feed(request["text"])
            elif kind == "beat":
                output.say({"beat": 1})
            elif kind == "end" and number in tasks:
                threading.Thread(target=tasks[number].end, args=(request["patience_s"],), daemon=True).start()
        except OSError as error:
            output.say({"id": number, "line": f"{type(error).__name__}: {error}"})
            output.say({"id": number, "status": 126})


class _LauncherLines:
    """Lines to the launcher, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, message: dict[str, object], before: str = "") -> None:
        data = (before + json.dumps(message) + "\n").encode()
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]


class _Requests:
    """Reads stdin until it ends."""

    def __init__(self) -> None:
        self._data = b""
        self.heard = time.monotonic()
        """When something last arrived."""

    def __iter__(self) -> Iterator[AgentRequest]:
        while True:
            while b"\n" not in self._data:
                if not self._more():
                    return
            line, self._data = self._data.split(b"\n", 1)
            if line.strip():
                yield json.loads(line)

    def take(self, size: int, on_some: Callable[[], None]) -> bytes:
        """Read this many bytes; `on_some` is called while they arrive, because heartbeats wait in the queue after
        them."""
        while len(self._data) < size:
            if not self._more():
                raise EOFError
            on_some()
        data, self._data = self._data[:size], self._data[size:]
        return data

    def _more(self) -> bool:
        data = os.read(0, 1 << 20)
        self.heard = time.monotonic()
        self._data += data
        return bool(data)


class _Task:
    """A command in its own session. Its lines go to the launcher as they come, then its status."""

    def __init__(self, request: AgentRequest, output: _LauncherLines) -> None:
        self._number, self._output = request["id"], output
        self.patience_s: float = request.get("patience_s", PATIENCE_S)
        self._asked = self._killed = False
        self._folder: str = request.get("remove", "")
        cwd = _place(request.get("cwd") or "~")
        os.makedirs(cwd, exist_ok=True)
        own = {name: value for name, value in os.environ.items() if name != "POTLUCK_TOKEN"}
        self._process = subprocess.Popen(
            [str(os.getpid()) if word == AGENT_PID else word for word in request["argv"]],
            cwd=cwd,
            env={**own, **request.get("env", {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output.say({"id": self._number, "pid": self._process.pid})
        threading.Thread(target=self._follow, daemon=True).start()
        self.feed(request.get("feed", ""))
        if request.get("runs"):
            threading.Thread(target=self._find_run, args=(_place(request["runs"]),), daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in iter(lambda: self._process.stdout.readline(1 << 16), b""):  # type: ignore[union-attr]
            self._output.say({"id": self._number, "line": line.decode(errors="replace").rstrip("\n")})
        status = self._process.wait()
        self._kill_group()
        self._output.say({"id": self._number, "status": status})

    def _find_run(self, runs: str) -> None:
        """Report the command's run folder and token; the folder's lock names the process."""
        began = time.time() - 2
        while self._process.poll() is None:
            for folder in _entries(runs):
                if _read(folder, ".lock") != str(self._process.pid):
                    continue
                with contextlib.suppress(OSError):
                    new = os.path.getmtime(os.path.join(folder, "token")) >= began
                    if new and (token := _read(folder, "token")):
                        self._output.say({"id": self._number, "run": folder, "token": token})
                        return
            time.sleep(0.05)

    def feed(self, text: str) -> None:
        """Write to its stdin, which stays open, because closing it ends the task."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, number)

    def ask(self) -> None:
        """Ask it to leave: close its stdin and send SIGTERM."""
        self._asked = True
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)

    def end(self, patience_s: float | None = None) -> None:
        """Ask it to leave, then kill it and everything that it has started."""
        if not self._asked:
            self.ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.patience_s if patience_s is None else patience_s)
        self._kill_group()

    def remove(self) -> None:
        """Remove the folder that was made for it, in case its launcher ended before it could."""
        deadline = time.monotonic() + 1.0  # what has just been killed may still write
        while self._folder and os.path.exists(_place(self._folder)) and time.monotonic() < deadline:
            shutil.rmtree(_place(self._folder), ignore_errors=True)

    def _kill_group(self) -> None:
        """Kill only once: later the number may belong to another process."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _entries(folder: str) -> list[str]:
    """The newest few folders; the one that is wanted was just written."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in sorted(entries, key=lambda e: -e.stat().st_mtime)[:20]]
    return []


def _read(folder: str, name: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read(4096).strip()
    return ""


def _place(path: str) -> str:
    return os.path.expanduser(path)


def _put(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(data)
    os.replace(part, path)


# -- facts ----------------------------------------------------------------------------------------------


def facts(wanted: AgentWants) -> dict[str, object]:
    """The facts that the launcher needs before it uses this machine. Their type is in spec/agent_reports.py."""
    cache = _place(wanted["cache"])
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(os.path.expanduser, _PATHS)])
    env = os.path.join(cache, "{}-py{}.{}".format(wanted["env"], *sys.version_info[:2]))
    found: dict[str, object] = {
        "pid": os.getpid(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": sys.platform,
        "architecture": platform.machine(),
        "bits": 64 if sys.maxsize > 1 << 32 else 32,
        "clock_s": time.time(),
        "cores": os.cpu_count() or 1,
        "uv": shutil.which("uv", path=path) or "",
        "venv": _has("venv") and (_has("ensurepip") or _has("pip")),
        "lacks": [name for name, least in wanted["needs"].items() if _version_of(name) < _numbers(least)],
        "code": os.path.isdir(os.path.join(cache, wanted["code"])),
        "env": env,
        "ready": os.path.exists(os.path.join(env, "ready")),
        "gpus": _gpus(path),
        "wsl": "microsoft" in platform.release().lower(),
        "cache": cache,
        "pythonpath": os.environ.get("PYTHONPATH", ""),
        "box": _read("/proc/sys/kernel/random", "boot_id") or platform.node(),
    }
    found.update(_disk(cache))
    return found


def _disk(cache: str) -> dict[str, object]:
    part = os.path.join(cache, f".try-{os.getpid()}")
    try:
        os.makedirs(cache, exist_ok=True)
        with open(part, "wb") as file:
            file.write(bytes(1 << 16))
        os.remove(part)
        state = os.statvfs(cache)
        noexec = bool(state.f_flag & getattr(os, "ST_NOEXEC", 0))
        return {"free_bytes": state.f_bavail * state.f_frsize, "noexec": noexec, "write_error": ""}
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(part)
        return {"free_bytes": 0, "noexec": False, "write_error": error.strerror or str(error)}


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version_of(name: str) -> tuple[int, ...]:
    try:
        return _numbers(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return ()


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _gpus(path: str) -> int:
    if listed := _entries("/proc/driver/nvidia/gpus"):
        return len(listed)  # nvidia-smi may take a second
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return 0
    try:
        shown = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return shown.count("GPU ")
