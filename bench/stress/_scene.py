"""One run of the counting job with its host and guests, and what must be true of what it leaves.

Owns the command lines and the checks. It must not know why or when somebody dies.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from _forks import DEADLINE_S, Process, Trouble, potluck

JOB = Path(__file__).with_name("count_job.py")
BATCH, EVERY = 32, 5
HOST_S, GUEST_S = 0.001, 0.001
"""Seconds a sample: slow enough for a guest on the same machine to be of help."""
SAMPLES = 160


class Scene:
    """A host, its guests and their run folder; all of them end with it."""

    def __init__(self, folder: Path, *, steps: int | None = None, job: Sequence[object] = ()) -> None:
        self.runs = folder / "runs"
        self.out = folder / "weights.safetensors"
        self.until = folder / "enough"
        self._folder, self._steps, self._job = folder, steps, job
        self._all: list[Process] = []
        self._since = 0
        """How many events there were when the newest host was started."""
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        (folder / "run.toml").write_text("[run]\ncheck_replica_every = 3\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._all:
            process.kill()

    # -- processes --------------------------------------------------------------------------------------

    def host(self, *options: object, failpoint: str = "", resume: bool = False) -> Process:
        self._since = len(self.events())
        words = ["host", JOB, "--bind", "127.0.0.1", "--threads", 1, "--name", "host", "--view", "plain"]
        words += ["--device", f"paced:{HOST_S}", "--micro-batch", 4, "--codec", "none", "--checkpoint-every", EVERY]
        words += ["--config", self._folder / "run.toml"]
        words += ["--resume", self.run] if resume else ["--runs", self.runs]
        job = ["--batch", BATCH, "--out", self.out, "--until", self.until, *self._job]
        job += ["--steps", self._steps] if self._steps is not None else []
        return self._start("host", [*words, *options, "--", *job], failpoint)

    def guest(self, name: str, *options: object, failpoint: str = "") -> Process:
        token = self.run / "token"
        words = ["join", "--token-file", token, "--name", name, "--threads", 1, "--view", "plain"]
        return self._start(name, [*words, "--device", f"paced:{GUEST_S}", "--micro-batch", 4, *options], failpoint)

    def _start(self, name: str, words: list[object], failpoint: str) -> Process:
        env = {"TMPDIR": str(self._temporary), **({"POTLUCK_FAILPOINT": failpoint} if failpoint else {})}
        log = self._folder / f"{len(self._all):02d}-{name}.log"
        self._all.append(potluck(words, name=name, log=log, env=env))
        return self._all[-1]

    def tails(self) -> str:
        return "\n".join(process.tail() for process in self._all)

    # -- what the run folder says -----------------------------------------------------------------------

    @property
    def run(self) -> Path:
        (run,) = self.runs.iterdir()
        return run

    def has_manifest(self) -> bool:
        """Whether guests can be told the token."""
        return any(self.runs.glob("*/manifest.json"))

    def events(self, kind: str | None = None, **fields: object) -> list[dict[str, Any]]:
        """The events so far; of lines that a kill has cut, or that are being written, there may be one an end."""
        found = []
        file = next(iter(self.runs.glob("*/events.jsonl")), None)
        for line in file.read_text(encoding="utf-8").split("\n") if file is not None else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [
            e for e in found if kind in (None, e["event"]) and all(e.get(k) == value for k, value in fields.items())
        ]

    def reached(self) -> int:
        """The last step whose event is in the log."""
        steps = self.events("step")
        return int(steps[-1]["step"]) if steps else 0

    def acknowledged(self) -> int:
        """The newest checkpoint that the log tells of, in the history that counts; 0: none."""
        newest = 0
        for event in self.events():
            if event["event"] == "checkpoint":
                newest = int(event["step"])
        return newest

    def helped(self) -> set[str]:
        """The machines that have contributed to the newest host's steps."""
        steps = (e for e in self.events()[self._since :] if e["event"] == "step")
        return {name for event in steps for name, samples in event["samples"].items() if samples}

    def joined(self) -> set[str]:
        """The guests that the newest host has taken in; how much it then asks of them depends on the box."""
        return {e["machine"] for e in self.events()[self._since :] if e["event"] == "guest_joined"}

    def started(self) -> bool:
        """Whether the newest host has begun to train."""
        return any(e["event"] == "run_start" for e in self.events()[self._since :])

    def history(self) -> list[dict[str, Any]]:
        """The steps that count: a resumed run begins again at its checkpoint, and what came after it is void."""
        steps: list[dict[str, Any]] = []
        for event in self.events():
            if event["event"] == "run_start":
                steps = steps[: event["resumed_from"] or 0]
            elif event["event"] == "step":
                steps.append(event)
        return steps

    # -- what must hold ---------------------------------------------------------------------------------

    def check_checkpoints(self) -> int:
        """After a kill: all that can be read, none that was acknowledged is lost. The step to be resumed from."""
        from potluck.errors import PotluckError
        from potluck.train import checkpoint_folder
        from potluck.train.checkpoint import load_latest

        acknowledged = self.acknowledged()
        try:
            loaded = load_latest(self.run / "checkpoints")
            for path in checkpoint_folder.newest_first(self.run / "checkpoints"):
                checkpoint_folder.verified(path, checkpoint_folder.FolderManifest)
        except (PotluckError, checkpoint_folder.DamagedError) as error:
            raise Trouble(f"an unreadable checkpoint: {error}") from None
        found = loaded.step if loaded is not None else 0
        if found < acknowledged:
            raise Trouble(f"checkpoint {acknowledged} was acknowledged, {found} is the newest")
        return found

    def check_resumed(self, saved: int) -> None:
        started = self.events("run_start")[-1]
        if (started["resumed_from"] or 0) != saved:
            raise Trouble(f"resumed from {started['resumed_from']}, not from {saved}")

    def check_end(self, steps: int | None = None) -> int:
        """The run is over: every step once, full, and every sample counted as often as it was dealt."""
        history = self.history()
        wanted = steps if steps is not None else self._steps or len(history)
        if [e["step"] for e in history] != list(range(1, wanted + 1)):
            raise Trouble(f"the steps are {[e['step'] for e in history]}, not 1 to {wanted}")
        for event in history:
            if sum(event["samples"].values()) != BATCH:
                raise Trouble(f"step {event['step']} has the samples {event['samples']}")
        ends = self.events("run_end")
        if not ends or (ends[-1]["step"], ends[-1]["reason"]) != (wanted, "finished"):
            raise Trouble(f"the run ended with {ends[-1:]}, not at step {wanted}")
        self.check_weights(wanted)
        left = sorted(name for name in os.listdir(self.run / "checkpoints"))
        # Two are kept; one more where a kill fell between the last save of all and the removal.
        if len(left) > 3 or any(not name.startswith("step-") or name.endswith(".new") for name in left):
            raise Trouble(f"the checkpoints at the end are {left}")
        return wanted

    def check_weights(self, steps: int) -> None:
        from safetensors.numpy import load_file

        weights = load_file(self.out)
        dealt: Counter[int] = Counter()
        for epoch in range(-(-steps * BATCH // SAMPLES)):
            order = np.random.Generator(np.random.PCG64([0, epoch])).permutation(SAMPLES)
            dealt.update(int(i) for i in order[: steps * BATCH - epoch * SAMPLES])
        counted = (weights["counts"] * -BATCH).tolist()
        wrong = {i: (counted[i], dealt[i]) for i in range(SAMPLES) if counted[i] != dealt[i]}
        if wrong:
            raise Trouble(f"{len(wrong)} samples were not counted as dealt: {list(wrong.items())[:5]}")
        if any((weights[name] != -steps).any() for name in weights if name.startswith("ballast")):
            raise Trouble(f"the updates do not add up to {steps} full steps")

    def finish(self, host: Process, deadline_s: float = DEADLINE_S) -> int:
        """Let an endless run end, and check it; its steps."""
        self.until.touch()
        host.succeeds(deadline_s)
        return self.check_end()
