"""R3: kill at every named failpoint, of the host and of a guest, and resume.

    .venv/bin/python bench/stress/r3_failpoints.py [--each 10] [--only checkpoint,file] [--minutes 180] [--json]

For each name so many kills, at the first passing or a later one, at once or some milliseconds after it. After a
kill of the host: every checkpoint readable, none that was acknowledged lost; it is started again with the same
command and must come to its end. After a kill of a guest the host must come to its end without it. In both
cases: exactly the wanted number of steps, each of exactly `global_batch` samples, and weights that prove every
sample counted exactly once (see count_job.py). A start that is killed before there is a run to be resumed must
leave nothing in a new one's way. `potluck plan --save` and `potluck doctor --save` leave the old file or the new.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
from pathlib import Path
from typing import Any

from _campaign import begin
from _forks import Process, Trouble, potluck
from _scene import EVERY, JOB, Scene

from potluck.failpoints import NAMES

STEPS = 30
KILLED = -signal.SIGKILL
LATE = ("revoke", "stopped")
DROPPED = ("dropped",)
SPOILT = ("resync",)
LEAVING = ("leave",)
REFUSED = ("refuse",)
REPLACED = ("checkpoint.before-replace", "checkpoint.replacing", "checkpoint.replaced")
ONCE = ("run", "hello", "ready", "welcome", "tensor", "check", "sketch", "bye", "leave", "refuse", "keys", "token")
ONCE += ("manifest", "introduce", "introduced", "compare", "compared", "closed")
SAVED = {"result": ("plan", "home-pair")}
"""The file that no run writes, and a command that does: `--save` and `--json` of all verbs are one function."""
TRIES = 5
"""So many runs for one kill at most: one may be passed by, where the count was too high or nobody was late."""


def more(parser: Any) -> None:
    parser.add_argument("--each", type=int, default=10, help="kills at each failpoint")
    parser.add_argument("--only", default="", help="names that begin so, with commas between several")


campaign = begin("R3", "kill at every named failpoint, resume", times=1 << 30, minutes=180, more=more)
each = campaign.options.each
names = [name for name in NAMES if name.startswith(tuple(campaign.options.only.split(",")))]
campaign.times = min(campaign.times, each * len(names))
kills: dict[str, int] = dict.fromkeys(names, 0)
tries: dict[str, int] = dict.fromkeys(names, 0)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    """One run with a kill at the failpoint that has had the fewest; 0: it was not reached this time."""
    left = [name for name in names if kills[name] < each and tries[name] < TRIES * each]
    if not left:
        campaign.minutes = 0  # what is missing cannot be reached: `short_of` tells
        return 0
    name = min(left, key=lambda name: tries[name])
    tries[name] += 1
    # Where it was passed by, the count may have been too high.
    passed_by = tries[name] - 1 > kills[name]
    failpoint = f"{name}={action(chance)}@{1 if passed_by else count(name, chance)}"
    last = name.rpartition(".")[2]
    if last in SAVED and name.startswith("file."):
        killed = saver_dies(folder, SAVED[last], f"{name}=kill")
        kills[name] += killed
        campaign.add(runs=1, saver_kills=int(killed))
        return int(killed)
    with Scene(folder, steps=STEPS, job=troubles_wanted(name)) as scene:
        try:
            killed = play(scene, name, failpoint, chance)
        except Trouble as trouble:
            kills[name] += 1
            raise Trouble(f"{failpoint}: {trouble}\n{scene.tails()}") from None
    campaign.add(runs=1)
    if killed:
        kills[name] += 1
        campaign.add(**{f"{'guest' if name.startswith('guest.') else 'host'}_kills": 1})
    return int(killed)


def action(chance: random.Random) -> str:
    return "kill" if chance.random() < 0.6 else f"kill:{chance.uniform(0.001, 0.06):.4f}"


def count(name: str, chance: random.Random) -> int:
    rarely = any(part in ONCE for part in name.replace("-", ".").split("."))
    return 1 if rarely else 1 + int(chance.expovariate(1 / 4))


def troubles_wanted(name: str) -> list[object]:
    """What makes guests late, or their gradients useless, where the failpoint is about that."""
    last = name.rpartition(".")[2]
    wanted = (("--late", LATE), ("--poison", DROPPED), ("--spoil", SPOILT))
    return [word for flag, kinds in wanted if last in kinds for word in (flag, 0.3)]


def play(scene: Scene, name: str, failpoint: str, chance: random.Random) -> bool:
    """One run with one kill, to its end; False where the failpoint was not reached."""
    if name.startswith("guest."):
        return guest_dies(scene, name, failpoint)
    before_a_run = name.startswith("run.") or name.endswith(".keys")
    resumed = name in REPLACED or (not before_a_run and chance.random() < 0.3)
    return resumed_host_dies(scene, name, failpoint) if resumed else new_host_dies(scene, name, failpoint)


def guest_dies(scene: Scene, name: str, failpoint: str) -> bool:
    host = scene.host("--wait-for", 1)
    host.until(scene.has_manifest, "run")
    scene.guest("bob")  # for whom the host may wait if the other one dies before it is admitted
    guest = company(scene, host, name, failpoint)
    host.succeeds()
    scene.check_end()
    with contextlib.suppress(Trouble):
        guest.wait(3.0)
    return guest.status == KILLED


def new_host_dies(scene: Scene, name: str, failpoint: str) -> bool:
    host = scene.host("--wait-for", 1, failpoint=failpoint)
    host.until(lambda: scene.has_manifest() or not host.running(), "run")
    if scene.has_manifest():
        company(scene, host, name)
        host.wait()
    return ended(scene, host)


def resumed_host_dies(scene: Scene, name: str, failpoint: str) -> bool:
    """Killed once at any moment, then at the failpoint; where one is to be replaced, it has to be damaged first."""
    host = scene.host("--wait-for", 1)
    host.until(scene.has_manifest, "run")
    company(scene, host, name)
    host.until(lambda: scene.acknowledged() >= 2 * EVERY, "two checkpoints")
    host.kill()
    scene.check_checkpoints()
    if name in REPLACED:
        newest = max((scene.run / "checkpoints").glob("step-*"))
        with (newest / "weights-000.safetensors").open("r+b") as file:
            file.write(b"\xff")
        (scene.run / "events.jsonl").write_text("")  # what it acknowledges is gone by our own hand
    host = scene.host(resume=True, failpoint=failpoint)
    host.wait()
    return ended(scene, host, whole_log=name not in REPLACED)


def saver_dies(folder: Path, command: tuple[str, ...], failpoint: str) -> bool:
    """A command that replaces a file is killed: the file is the old one or the new one, and saving works again."""
    path = folder / "saved.json"
    path.write_text('"before"')
    env = {"POTLUCK_FAILPOINT": failpoint}
    process = potluck([*command, "--save", path], name="saver", log=folder / "saver.log", env=env)
    process.wait()
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise Trouble(f"{failpoint}: the file is neither old nor new: {error}\n{process.tail()}") from None
    if process.status == KILLED and found != "before" and not isinstance(found, dict):
        raise Trouble(f"{failpoint}: the file holds {str(found)[:80]!r}")
    again = potluck([*command, "--save", path], name="saver", log=folder / "saver.log")
    again.wait()
    if json.loads(path.read_text()) == "before":
        raise Trouble(f"{failpoint}: nothing was saved afterwards\n{again.tail()}")
    return process.status == KILLED


def ended(scene: Scene, host: Process, *, whole_log: bool = True) -> bool:
    """The host is dead: resume it, or if there was no run yet, begin anew; then everything must be right."""
    if host.status not in (0, KILLED):
        raise Trouble(f"the host ended with {host.status}")
    was_killed = host.status == KILLED
    if was_killed and not scene.has_manifest():
        for left_over in scene.runs.glob("*"):
            left_over.rename(scene.runs.with_name(f"left-{left_over.name}"))
        host = scene.host()
        host.succeeds()
    elif was_killed:
        if whole_log:
            scene.check_checkpoints()
        host = scene.host(resume=True)
        host.succeeds()
    if whole_log:
        scene.check_end()
    else:
        scene.check_weights(STEPS)
    return was_killed


def company(scene: Scene, host: Process, name: str, failpoint: str = "") -> Process:
    """The guests that the failpoint needs; the one that it is armed on, or else the first."""
    last = name.rpartition(".")[2]
    ann = scene.guest("ann", failpoint="" if last in REFUSED else failpoint)
    if last in LEAVING:
        with contextlib.suppress(Trouble):  # the host may die before, of something else
            host.until(lambda: "ann" in scene.helped(), "a contribution")
        ann.signal(signal.SIGTERM)
    if last in REFUSED:
        other = JOB.read_text().replace("SAMPLES = 160", "SAMPLES = 161")
        script = scene.out.with_name("other_job.py")
        script.write_text(other)
        return scene.guest("eve", "--script", script, failpoint=failpoint)
    return ann


campaign.run(attempt)
campaign.figures |= {"only": campaign.options.only, "names": len(names)}
campaign.figures["names_killed_at"] = sum(1 for times in kills.values() if times)
if short := {name: times for name, times in kills.items() if times < each}:
    campaign.figures["short_of"] = short
raise SystemExit(campaign.end())
