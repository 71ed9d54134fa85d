"""R4: kill -9 a process while it saves a checkpoint; and the same to one that calls torch.save onto its one file.

    .venv/bin/python bench/stress/r4_save_window.py [--times 500] [--in-place 200] [--minutes 30] [--json]

A process saves a model of some megabytes over and over and says by a pipe when a save begins and ends. It is
killed at a random moment in between; only kills that fell inside a save count. Then the newest checkpoint must
be whole, not older than the last one that was acknowledged, and hold its own step's values. The contrast is
measured the same way: a file that torch.save writes in place is unreadable when it is no whole zip archive
(nothing is unpickled here).
"""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _campaign import begin
from _forks import DEADLINE_S, Process, Trouble, fork
from torch import nn

from potluck.train.checkpoint import Snapshot, load_latest, save

SIZE, LAYERS = 600, 3
"""Three layers of 600 × 600: 4.3 MB of weights, 13 MB with AdamW's averages."""
KILLS_A_PROCESS_FOLDER = 25


def more(parser: Any) -> None:
    parser.add_argument(
        "--in-place", type=int, default=200, help="kills of a process that calls torch.save in place"
    )


campaign = begin("R4", "kill -9 inside the save window", times=500, minutes=30, more=more)
lengths_s = {"checkpoint": [0.05], "in place": [0.02]}


def build(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """All of it, weights and averages, is the one value."""
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.data.fill_(value)
        optimizer.state[parameter] = {
            "step": torch.tensor(value),
            "exp_avg": torch.full_like(parameter, value),
            "exp_avg_sq": torch.full_like(parameter, value),
        }
    return model, optimizer


def save_again_and_again(folder: Path, first: int, say: int) -> int:
    step = first
    while True:
        # At times the step that is there already: replacing one must be safe, too.
        step += step % 4 != 0 or random.random() < 0.5
        model, optimizer = build(float(step))
        os.write(say, b"(%d\n" % step)
        save(folder, Snapshot(step=step, model=model, optimizer=optimizer))
        os.write(say, b")%d\n" % step)


def save_in_place(file: Path, first: int, say: int) -> int:
    for step in range(first + 1, 1 << 30):
        model, optimizer = build(float(step))
        os.write(say, b"(%d\n" % step)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        os.write(say, b")%d\n" % step)
    return 0


def cut(
    work: Callable[[Path, int, int], int], path: Path, first: int, kind: str, chance: random.Random
) -> int | None:
    """Kill the saver inside a save; the last step that was acknowledged, or None: it fell between two."""
    hear, say = os.pipe()
    saver = fork(lambda: work(path, first, say), name="saver", log=path.with_name("saver.log"))
    os.close(say)
    try:
        words = _until_begun(hear, saver, after=1 + chance.randrange(2))
        time.sleep(chance.uniform(0.0, 1.1 * statistics.median(lengths_s[kind])))
        saver.kill()
        words += _rest(hear)
    finally:
        saver.kill()
        os.close(hear)
    if saver.status != -signal.SIGKILL:
        raise Trouble(f"the saver ended with {saver.status}\n{saver.tail()}")
    lines = words.split("\n")[:-1]
    acknowledged = [int(line[1:]) for line in lines if line.startswith(")")]
    if lines[-1].startswith(")"):
        return None
    return max(acknowledged, default=first)


def _until_begun(hear: int, saver: Process, after: int) -> str:
    """Until a save begins that comes after so many whole ones; all that was said until then."""
    words, deadline = "", time.monotonic() + DEADLINE_S
    while True:
        if time.monotonic() > deadline or not saver.running():
            raise Trouble(f"no save began\n{saver.tail()}")
        if not select.select([hear], [], [], 0.5)[0]:
            continue
        words += os.read(hear, 4096).decode()
        if words.count(")") >= after and words.rstrip("\n").rpartition("\n")[2].startswith("("):
            return words


def _rest(hear: int) -> str:
    words = b""
    while part := os.read(hear, 4096):
        words += part
    return words.decode()


def measure(folder: Path) -> None:
    """How long a save takes here: the window to aim into."""
    for kind, work in (("checkpoint", save_one), ("in place", save_one_in_place)):
        lengths_s[kind] = [work(folder / "measured", step) for step in range(1, 6)]
    campaign.figures["save_ms"] = round(1000 * statistics.median(lengths_s["checkpoint"]), 1)
    campaign.figures["torch_save_ms"] = round(1000 * statistics.median(lengths_s["in place"]), 1)


def save_one(folder: Path, step: int) -> float:
    model, optimizer = build(float(step))
    began = time.monotonic()
    save(folder, Snapshot(step=step, model=model, optimizer=optimizer))
    return time.monotonic() - began


def save_one_in_place(folder: Path, step: int) -> float:
    model, optimizer = build(float(step))
    began = time.monotonic()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "whole.pt")
    return time.monotonic() - began


def ours(number: int, folder: Path, chance: random.Random) -> int:
    """Some kills into one folder, so that each saver finds what the last one left."""
    if number == 0:
        measure(folder)
    checkpoints, newest, counted = folder / "checkpoints", 0, 0
    wanted = min(KILLS_A_PROCESS_FOLDER, campaign.times - campaign.done)
    while counted < wanted and not campaign.time_is_up:
        acknowledged = cut(save_again_and_again, checkpoints, newest, "checkpoint", chance)
        newest = whole(checkpoints, newest if acknowledged is None else max(newest, acknowledged))
        if acknowledged is None:
            campaign.add(between_two_saves=1)
        else:
            counted += 1
            campaign.add(cut_saves=len(list(checkpoints.glob(".tmp-0*"))))
    return counted


def whole(checkpoints: Path, at_least: int) -> int:
    loaded = load_latest(checkpoints)
    if loaded is None or loaded.skipped:
        raise Trouble(f"an unreadable checkpoint: {loaded and loaded.skipped}")
    if loaded.step < at_least:
        raise Trouble(f"checkpoint {at_least} was acknowledged, {loaded.step} is the newest")
    model, optimizer = build(0.0)
    loaded.restore(model, optimizer, {})
    values = {float(v) for t in model.state_dict().values() for v in (t.min(), t.max())}
    values |= {float(v) for s in optimizer.state.values() for t in s.values() for v in (t.min(), t.max())}
    if values != {float(loaded.step)}:
        raise Trouble(f"checkpoint {loaded.step} holds {sorted(values)}")
    return loaded.step


def in_place(folder: Path, chance: random.Random) -> None:
    kills = unreadable = 0
    while kills < campaign.options.in_place and not campaign.time_is_up:
        acknowledged = cut(save_in_place, folder / "checkpoint.pt", 0, "in place", chance)
        if acknowledged is not None:
            kills += 1
            unreadable += not is_archive(folder / "checkpoint.pt")
    campaign.figures |= {"in_place_kills": kills, "in_place_unreadable": unreadable}


def is_archive(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, EOFError):
        return False


def main() -> int:
    campaign.run(ours)
    with tempfile.TemporaryDirectory(prefix="potluck-stress-") as folder:
        in_place(Path(folder), random.Random(campaign.seed))
    return campaign.end()


if __name__ == "__main__":
    raise SystemExit(main())
