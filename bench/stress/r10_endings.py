"""R10: every way in which a run or a guest can end, at any moment: nobody and nothing is left after 10 s.

    .venv/bin/python bench/stress/r10_endings.py [--times 200] [--minutes 60] [--json]

Ctrl-C, SIGTERM, the terminal gone, the host gone (kill -9), in turn. Half of them strike `potluck train` with one
or two guests on this machine, half a guest of another host; whatever is struck runs in a terminal of its own. After
each: no process is left 10 s later, the port is free, no shared memory and no temporary file is left; what was hit
by anything but -9 has said goodbye (the host's log has its `run_end`, or the host has heard its guest's `leave`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
from _campaign import begin
from _forks import ROOT, Process, Trouble
from _scene import Scene

LIMIT_S = 10.0
KINDS = ("ctrl_c", "sigterm", "terminal_gone", "host_gone")
MARK = "STRESS_MARK"
os.environ["PYTHONPATH"] = str(ROOT / "src")  # for guests that the host starts
os.environ["TERM"] = "xterm"
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup guests would rightly stay
campaign = begin("R10", "Ctrl-C, SIGTERM, terminal gone, host gone", times=200, minutes=60)


class Terminal(Process):
    """A process at a terminal; what it shows is kept in its log."""

    def __init__(self, words: list[object], *, name: str, log: Path, env: dict[str, str]) -> None:
        from potluck.cli._app import run

        pid, self._screen = pty.fork()
        if pid == 0:
            status = 70
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.environ.update(env)
                status = run([str(word) for word in words])
            finally:
                os._exit(status)
        super().__init__(pid, name, log)
        os.set_blocking(self._screen, False)
        self._open = True

    def running(self) -> bool:
        self._look()
        return super().running()

    def _look(self) -> None:
        with contextlib.suppress(OSError), open(self.log, "ab") as log:
            while self._open and (text := os.read(self._screen, 65536)):
                log.write(text)

    def type(self, text: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._screen, text)

    def close(self) -> None:
        """The window is closed, or the network to it is gone."""
        if self._open:
            self._open = False
            os.close(self._screen)

    def kill(self) -> None:
        super().kill()
        self.close()

    def strike(self, kind: str) -> None:
        if kind == "ctrl_c":
            self.type(b"\x03")
        elif kind == "sigterm":
            self.signal(signal.SIGTERM)
        elif kind == "terminal_gone":
            self.close()
        else:
            os.kill(self.pid, signal.SIGKILL)


def attempt(number: int, folder: Path, chance: random.Random) -> None:
    kind, local = KINDS[number % len(KINDS)], number // len(KINDS) % 2 == 0
    shared = set(os.listdir("/dev/shm"))
    (folder / "temporary").mkdir()
    env = {"TMPDIR": str(folder / "temporary"), MARK: str(folder)}
    struck = train_struck(folder, kind, chance, env) if local else guest_struck(folder, kind, chance, env)
    check_nothing_left(folder, struck, shared, kind)
    campaign.add(**{kind: 1, "on_train" if local else "on_a_guest": 1})


# -- potluck train --------------------------------------------------------------------------------------


def train_struck(folder: Path, kind: str, chance: random.Random, env: dict[str, str]) -> list[psutil.Process]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    words = ["train", "gpt", "--guests", chance.choice((1, 1, 2)), "--steps", 10**6, "--depth", 1, "--sequence", 16]
    words += ["--batch-tokens", 256, "--runs", folder / "runs", "--name", "host", "--threads", 1]
    words += ["--device", "paced:0.005", "--micro-batch", 2, "--data", folder / "text.txt"]
    train = Terminal(words, name="train", log=folder / "train.log", env=env)
    try:
        train.until(lambda: list(folder.glob("runs/*/manifest.json")), "run folder")
        if early := chance.random() < 0.25:
            time.sleep(chance.uniform(0.0, 2.0))
        else:
            train.until(lambda: events(folder, "guest_joined"), "a guest")
            time.sleep(chance.uniform(0.0, 0.5))
        if not train.running():
            raise Trouble(f"it ended by itself\n{train.tail()}")
        below = psutil.Process(train.pid).children(recursive=True)
        began = bool(events(folder, "run_start"))
        train.strike(kind)
        at = time.monotonic()
        train.wait(LIMIT_S + 5.0)
        psutil.wait_procs(below, max(0.1, LIMIT_S - (time.monotonic() - at)))
        campaign.most(longest_end_s=round(time.monotonic() - at, 2))
        campaign.add(before_the_first_guest=int(early))
        if kind != "host_gone" and began and not events(folder, "run_end"):
            raise Trouble(f"{kind}: no end in the log\n{train.tail()}")
        if port_is_open(folder):
            raise Trouble(f"{kind}: the port is still open")
        return below
    finally:
        train.kill()


# -- a guest --------------------------------------------------------------------------------------------


def guest_struck(folder: Path, kind: str, chance: random.Random, env: dict[str, str]) -> list[psutil.Process]:
    with Scene(folder) as scene:
        host = scene.host()
        host.until(scene.has_manifest, "run")
        words = ["join", "--token-file", scene.run / "token", "--name", "ann", "--threads", 1]
        words += ["--device", "paced:0.001", "--micro-batch", 4, "--give-up", 1]
        guest = Terminal(words, name="ann", log=folder / "ann.log", env=env)
        try:
            if joined := chance.random() < 0.75:
                guest.until(lambda: scene.events("guest_joined"), "joined")
            else:
                guest.until(lambda: scene.events("guest_hello"), "hello")
            time.sleep(chance.uniform(0.0, 0.5))
            at = time.monotonic()
            (host.kill if kind == "host_gone" else lambda: guest.strike(kind))()
            guest.wait(LIMIT_S + 5.0)
            ended_s = time.monotonic() - at
            campaign.most(longest_end_s=round(ended_s, 2))
            campaign.add(before_the_first_guest=int(not joined))
            if ended_s > LIMIT_S:
                raise Trouble(f"{kind}: the guest took {ended_s:.1f} s to end\n{guest.tail()}")
            if kind != "host_gone":
                host.until(lambda: scene.events("guest_left"), "goodbye of the guest")
                scene.finish(host)
        finally:
            guest.kill()
    return []


# -- what must be gone ----------------------------------------------------------------------------------


def check_nothing_left(folder: Path, struck: list[psutil.Process], shared: set[str], kind: str) -> None:
    orphans = [p for p in struck if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    orphans += [p for p in marked(folder) if p not in orphans]
    if orphans:
        words = [" ".join(p.cmdline())[:100] for p in orphans if p.is_running()]
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                process.kill()
        raise Trouble(f"{kind}: {len(orphans)} processes are left: {words}")
    numbers = {str(p.pid) for p in struck}
    left = [n for n in set(os.listdir("/dev/shm")) - shared if "potluck" in n or any(pid in n for pid in numbers)]
    # A guest's record of a fault is meant to be found; torch keeps a folder of its own there.
    meant = ("flight-", "torchinductor")
    files = [p.name for p in (folder / "temporary").iterdir() if not p.name.startswith(meant)]
    if left or files:
        raise Trouble(f"{kind}: shared memory {left}, temporary files {files}")


def marked(folder: Path) -> list[psutil.Process]:
    """Whatever was started with this attempt's mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    file = next(iter(folder.glob("runs/*/events.jsonl")), None)
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file is not None else []
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def port_is_open(folder: Path) -> bool:
    port = json.loads(next(folder.glob("runs/*/manifest.json")).read_text())["port"]
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


campaign.run(attempt)
raise SystemExit(campaign.end())
