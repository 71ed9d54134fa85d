"""A whole run on this machine for tests: a host and its guests as real processes, and what their run folder says.

    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "1", arguments=["--steps", "20"])
        fleet.guest("ann", "--device", "paced:0.01")
        host.succeeds(deadline_s=60)
        fleet.assert_every_step_is_full(global_batch=32)

It knows the command line and the files a run leaves, nothing of the code behind them.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from potluck.spec.events import from_json
from support.processes import Processes, TestProcess

Event = dict[str, Any]

JOB = Path(__file__).with_name("job.py")
"""A small training that travels to guests; see its --help."""
TORCH_STARTS_S = 60.0
"""A process with torch is up after some 3 s; several at once on a busy machine need far more."""


class Fleet(Processes):
    """Processes that belong to one run; its folder is `folder`, once the host has made it."""

    def __init__(self, folder: Path, *, fork: bool = True) -> None:
        super().__init__(folder, fork=fork)
        folder.mkdir(parents=True, exist_ok=True)
        self.runs = folder / "runs"
        # Outside of `folder`, whose name may be too long for the sockets of torch's worker processes.
        self._temporary = tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True)
        self.temporary = Path(self._temporary.name)
        self._left_at_end: list[str] | None = None
        self._read = b""
        self._events: list[Event] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._left_at_end = self._left()
        self._temporary.cleanup()

    def _left(self) -> list[str]:
        return [p.name for p in self.temporary.iterdir() if not p.name.startswith(("torchinductor", "flight-"))]

    # -- starting ----------------------------------------------------------------------------------------

    def host(
        self,
        what: str | Path,
        *options: str,
        arguments: Sequence[object] = (),
        ranks: int = 0,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "potluck"),
    ) -> TestProcess:
        """`potluck host` on the loopback, under torchrun with so many `ranks` if asked; returns once guests can be
        told the token."""
        words = ["--bind", "127.0.0.1", "--threads", "1", "--name", "host", "--view", "plain", *options]
        if "--resume" not in options:
            words += ["--runs", str(self.runs)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        words = [*torchrun, *program, "host", str(what), *words, "--", *map(str, arguments)]
        host = self.python(*words, name="host", env={**self._environment(), **(env or {})}, children=ranks)
        host.wait_until(lambda: list(self.runs.glob("*/manifest.json")), TORCH_STARTS_S, "run folder")
        return host

    def guest(
        self, name: str, *options: str, env: Mapping[str, str] | None = None, token: Path | None = None
    ) -> TestProcess:
        """`potluck join` with this run's token."""
        return self.start(
            [sys.executable, "-m", "potluck", *self.join_words(name, *options, token=token)],
            name=name,
            env={**self._environment(), **(env or {})},
        )

    def join_words(self, name: str, *options: str, token: Path | None = None) -> list[str]:
        file = token or self.folder / "token"
        return ["join", "--token-file", str(file), "--name", name, "--threads", "1", "--view", "plain", *options]

    def train(self, *options: str, guests: int) -> TestProcess:
        """`potluck train` with its run folder among this fleet's, and so many guests."""
        words = options if "--resume" in options else (*options, "--guests", str(guests), "--runs", str(self.runs))
        return self.potluck("train", *words, name="train", env=self._environment(), children=guests)

    def _environment(self) -> dict[str, str]:
        # Whatever a process puts into the system's folder for temporary files is seen by nothing_left().
        return {"TMPDIR": str(self.temporary)}

    # -- what the run folder says ------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    @property
    def port(self) -> int:
        return int(json.loads((self.folder / "manifest.json").read_text())["port"])

    def events(self, kind: str | None = None, machine: str | None = None) -> list[Event]:
        """The events so far, of one kind and about one machine if asked for."""
        file = self.folder / "events.jsonl"
        data = file.read_bytes() if file.exists() else b""
        if not data.startswith(self._read):
            self._read, self._events = b"", []
        # Whoever waits asks fifty times a second: what was there before is not read again. The last line may be
        # half written.
        complete = data[: data.rfind(b"\n") + 1]
        for line in complete[len(self._read) :].splitlines():
            assert from_json(line.decode()), "an event that this version would not read"
            self._events.append(json.loads(line))
        self._read = complete
        found = [e for e in self._events if kind is None or e["event"] == kind]
        return found if machine is None else [e for e in found if e.get("machine") == machine]

    def steps(self) -> list[Event]:
        return self.events("step")

    def step_reached(self) -> int:
        steps = self.steps()
        return int(steps[-1]["step"]) if steps else 0

    def wait_for(
        self, host: TestProcess, found: Callable[[], Any], what: str, deadline_s: float = TORCH_STARTS_S
    ) -> Any:
        """Until `found` says something true of the run folder, which the host has made."""
        return host.wait_until(found, deadline_s, what)

    def wait_for_step(self, host: TestProcess, step: int, deadline_s: float = TORCH_STARTS_S) -> None:
        self.wait_for(host, lambda: self.step_reached() >= step, f"step {step}", deadline_s)

    def wait_for_event(
        self, host: TestProcess, kind: str, machine: str, count: int = 1, deadline_s: float = TORCH_STARTS_S
    ) -> Event:
        """Until the event has come `count` times; the last of them."""
        self.wait_for(host, lambda: len(self.events(kind, machine)) >= count, f"{kind} of {machine}", deadline_s)
        return self.events(kind, machine)[count - 1]

    # -- what must hold ----------------------------------------------------------------------------------

    def assert_every_step_is_full(self, *, global_batch: int, steps: int | None = None) -> None:
        """Steps 1 to `steps` (or to the last), each once and in order, each with exactly the batch's samples."""
        found = self.steps()
        assert [e["step"] for e in found] == list(range(1, (steps or len(found)) + 1))
        wrong = {e["step"]: e["samples"] for e in found if sum(e["samples"].values()) != global_batch}
        assert not wrong, f"steps that are not of {global_batch} samples: {wrong}"

    def steps_with(self, machine: str) -> list[int]:
        """The steps to which this machine contributed samples."""
        return [e["step"] for e in self.steps() if e["samples"].get(machine, 0) > 0]

    def assert_nothing_left(self) -> None:
        """No port is open and no temporary file lies about."""
        assert not port_is_open(self.port), f"something still listens on {self.port}"
        # torch keeps a folder of its own there, for code it compiles; a guest's record of a fault is meant to stay.
        left = self._left() if self._left_at_end is None else self._left_at_end
        assert not left, f"temporary files: {left}"


def port_is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def descendants(process: TestProcess) -> list[psutil.Process]:
    """The processes below a process, in whatever session they are."""
    return psutil.Process(process.pid).children(recursive=True)


def still_running(processes: Sequence[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that have not ended in that time; they are killed."""
    _, alive = psutil.wait_procs(processes, within_s)
    for process in alive:
        process.kill()
    return alive
