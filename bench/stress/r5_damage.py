"""R5: cut, or flip bits in, any file of the newest checkpoint: it must be noticed, and the one before it loaded.

    .venv/bin/python bench/stress/r5_damage.py [--times 1000] [--minutes 10] [--json]

Each time another file, another way and another place: one bit, some bits, a run of bytes, a cut at any length,
an empty file, bytes added at the end, the bytes of another checkpoint's file. The bytes are put back
afterwards.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from _campaign import begin
from _forks import Trouble
from torch import nn

from potluck.train.checkpoint import Snapshot, load_latest, save
from potluck.train.saved_place import SavedPlace

DAMAGES_A_FOLDER = 100
campaign = begin("R5", "truncate or flip bits in any checkpoint file", times=1000, minutes=10)


def make(folder: Path, step: int) -> Path:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(8, 40)).square().mean().backward()
    optimizer.step()
    average = nn.Linear(3, 3)
    return save(
        folder,
        Snapshot(
            step=step,
            model=model,
            optimizer=optimizer,
            objects={"average": average},
            place=SavedPlace(samples=None, global_batch=None, seed=step),
        ),
    )


def damaged(whole: bytes, other: bytes, chance: random.Random) -> tuple[str, bytes]:
    """One way to spoil a file; always another content than before."""
    how = chance.choice(["bit", "bits", "run", "cut", "empty", "longer", "another's"])
    raw = bytearray(whole)
    if how == "bit":
        _flip(raw, chance)
    elif how == "bits":
        for _ in range(chance.randint(2, 64)):
            _flip(raw, chance)
    elif how == "run":
        at = chance.randrange(len(raw))
        raw[at : at + chance.randint(1, 512)] = chance.randbytes(len(raw[at : at + 512]))
    elif how == "cut":
        raw = raw[: chance.randrange(1, len(raw))]
    elif how == "empty":
        raw = bytearray()
    elif how == "longer":
        raw += chance.randbytes(chance.randint(1, 64))
    else:
        raw = bytearray(other)
    return how, bytes(raw) if bytes(raw) != whole else bytes(raw[:-1])


def _flip(raw: bytearray, chance: random.Random) -> None:
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    """Every file of the newest checkpoint in turn."""
    before, newest = make(folder, 1), make(folder, 2)
    files = sorted(path.name for path in newest.iterdir())
    if len(files) != 4:
        raise Trouble(f"the checkpoint has the files {files}")
    times = min(DAMAGES_A_FOLDER, campaign.times - campaign.done)
    for time in range(times):
        name = files[time % len(files)]
        whole = (newest / name).read_bytes()
        how, content = damaged(whole, (before / name).read_bytes(), chance)
        (newest / name).write_bytes(content)
        noticed(folder, newest, name, how)
        (newest / name).write_bytes(whole)
        campaign.add(**{how: 1})
    loaded = load_latest(folder)
    if loaded is None or loaded.step != 2:
        raise Trouble("the checkpoint with its own bytes back is not accepted")
    return times


def noticed(folder: Path, newest: Path, name: str, how: str) -> None:
    loaded = load_latest(folder)
    if loaded is None or loaded.step != 1 or loaded.place.seed != 1:
        raise Trouble(f"{name}, {how}: loaded {loaded and loaded.path}")
    ((path, reason),) = loaded.skipped
    # A manifest of another step, whole in itself, is told apart by the files that it does not describe.
    if path != newest or (name not in reason and how != "another's"):
        raise Trouble(f"{name}, {how}: {path} was left out because {reason!r}")
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 10))
    loaded.restore(model, torch.optim.AdamW(model.parameters()), {"average": nn.Linear(3, 3)})


campaign.run(attempt)
raise SystemExit(campaign.end())
