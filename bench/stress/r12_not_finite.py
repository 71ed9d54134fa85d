"""R12: NaN, infinite or huge gradients on the host, on its guests, or on both, for a while or to the end.

    .venv/bin/python bench/stress/r12_not_finite.py [--times 100] [--minutes 15] [--json]

A run of 14 steps with two guests each time, a checkpoint every other step. After it: every checkpoint that is
there is finite in all its tensors, and the newest is the one acknowledged last; a run whose host was well, or
not well for fewer steps than `max_bad_steps`, made all its steps and ended with status 0; one whose host was
not ended with status 1 and named the checkpoint to go on from; every step has exactly `global_batch` samples;
steps that were not applied are in the log with their cause; and where only guests were wrong and bounded, all
were applied.
"""

from __future__ import annotations

import random
from pathlib import Path

from _campaign import begin
from _forks import Process, Trouble
from _scene import Scene

JOB = Path(__file__).with_name("finite_job.py")
STEPS, BATCH, MOST = 14, 16, 3
campaign = begin("R12", "NaN, inf or huge values on the host, a guest, or both", times=100, minutes=15)


class FiniteScene(Scene):
    """A host and its guests in which numbers go wrong."""

    def __init__(self, folder: Path, job: list[object], *, bounded: bool) -> None:
        super().__init__(folder)
        self._words = job
        bound = "" if bounded else "guest_bound = 0\n"
        (folder / "run.toml").write_text(f"[run]\ncheck_replica_every = 3\nmax_bad_steps = {MOST}\n{bound}")

    def start(self, guests: int, codec: str) -> Process:
        words = ["host", JOB, "--bind", "127.0.0.1", "--threads", 1, "--name", "host", "--view", "plain"]
        words += ["--device", "paced:0.002", "--micro-batch", 4, "--codec", codec, "--checkpoint-every", 2]
        words += ["--wait-for", guests, "--config", self._folder / "run.toml", "--runs", self.runs]
        return self._start("host", [*words, "--", *self._words], "")

    def check_finite(self) -> int:
        """Every checkpoint is; how many there are."""
        from safetensors.torch import load_file

        from potluck.train import checkpoint_folder

        paths = checkpoint_folder.newest_first(self.run / "checkpoints")
        for path in paths:
            for file in path.glob("*.safetensors"):
                for name, tensor in load_file(file).items():
                    if not bool(tensor.isfinite().all()):
                        raise Trouble(f"{name} in {path.name}/{file.name} is not finite")
        newest = int(paths[0].name.removeprefix("step-")) if paths else 0
        if newest != self.acknowledged():
            raise Trouble(f"the newest checkpoint is of step {newest}, the log has {self.acknowledged()}")
        return len(paths)


def attempt(number: int, folder: Path, chance: random.Random) -> None:
    where = ("host", "guests", "both")[number % 3]
    what, codec = chance.choice(["nan", "inf", "huge", "limit"]), chance.choice(["none", "int8", "int4", "fp16"])
    first, bad = chance.randint(4, 9), chance.choice([1, 2, MOST, STEPS])
    bounded = chance.random() < 0.6
    job: list[object] = ["--steps", STEPS, "--batch", BATCH, "--where", where, "--what", what]
    job += ["--first", first, "--steps-bad", bad, *(["--clip", 1.0] if chance.random() < 0.5 else [])]
    with FiniteScene(folder, job, bounded=bounded) as scene:
        host = scene.start(2, codec)
        host.until(scene.has_manifest, "run")
        for name in ("ann", "bob"):
            scene.guest(name)
        try:
            status = host.wait()
            host_is_bad = where != "guests"
            ends = host_is_bad and min(bad, STEPS + 1 - first) >= MOST
            check(scene, host, status, ends=ends, calm=not host_is_bad and bounded)
        except Trouble as trouble:
            asked = f"{where} {what} from step {first}, {bad} steps, codec {codec}, bounded {bounded}"
            raise Trouble(f"{asked}: {trouble}\n{scene.tails()}") from None


def check(scene: FiniteScene, host: Process, status: int, *, ends: bool, calm: bool) -> None:
    """`ends`: the run must have been ended; `calm`: no step may have been left out."""
    campaign.add(checkpoints=scene.check_finite())
    steps, left_out = scene.events("step"), scene.events("step_not_applied")
    campaign.add(steps_not_applied=len(left_out), dropped=len(scene.events("contribution_dropped")))
    campaign.add(put_out=len([e for e in scene.events("guest_lost") if e.get("put_out")]), ended=int(status == 1))
    (end,) = scene.events("run_end")
    said = host.log.read_text(errors="replace")
    if ends:
        if status != 1 or end["reason"] != "failed" or "--resume" not in said or "not-finite" not in said:
            raise Trouble(f"it should have ended with an error and the way on, not with {status}, {end}")
    elif status != 0 or end["reason"] != "finished" or [e["step"] for e in steps] != list(range(1, STEPS + 1)):
        raise Trouble(f"it should have finished, not ended with {status}, {end}")
    if any(sum(event["samples"].values()) != BATCH for event in steps):
        raise Trouble("a step is not full")
    if [e["step"] for e in left_out] != [e["step"] for e in steps if not e["applied"]]:
        raise Trouble("steps that were not applied are not those that the log explains")
    if calm and left_out:
        raise Trouble(f"only guests were wrong, yet: {left_out[0]}")


campaign.run(attempt)
raise SystemExit(campaign.end())
