"""The strategies ddp and ddp-balanced: ranks with unequal shares do what one process does over the same samples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from potluck.train.recipes import get
from support.processes import Processes, TestProcess
from support.worker_specs import write_worker_spec

STEPS, SEED = 4, 3
SHARES = {"desk": 7, "laptop": 3, "old": 2}
BATCH = sum(SHARES.values())
CLIP = 3.5
"""Between the gradients' lengths of the steps, 4.7, 2.9, 4.3 and 2.9: Adam does not notice gradients of a wrong
scale, but clipping in some steps and not in others does."""
CONFIG = {"depth": 1, "sequence": 16, "batch_tokens": 16 * BATCH, "steps": STEPS, "seed": SEED}
CONFIG |= {"lr": 1e-3, "clip_norm": CLIP}


def write_spec(
    folder: Path, device: str = "cpu", shares: Sequence[int] = tuple(SHARES.values()), **changes: Any
) -> Path:
    members = [  # one has a single micro-batch, one has equal ones, one has unequal ones
        {"name": name, "device": device, "micro_batch": size, "share": share}
        for name, size, share in zip(SHARES, (3, 1, 8), shares)
    ]
    return write_worker_spec(folder, CONFIG, members, **{"steps": STEPS, "seed": SEED, **changes})


def start(processes: Processes, spec: Path, rank: int, env: dict[str, str] | None = None) -> TestProcess:
    words = ["-m", "potluck.lab.ddp_worker", "--spec", str(spec), "--rank", str(rank)]
    return processes.python(*words, name=f"rank-{rank}", env=env)


def trained_by_hand() -> tuple[dict[str, Tensor], list[float]]:
    """One process, whole batches, in the order that the docs promise; and each step's loss."""
    recipe = get("gpt")
    config = recipe.Config(**CONFIG)
    model, data = recipe.model(config), recipe.dataset(config)
    optimizer = recipe.optimizer(model, config)
    scheduler = recipe.scheduler(optimizer, config)
    order = np.random.Generator(np.random.PCG64([SEED, 0])).permutation(len(data))  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        chosen = [int(i) for i in order[step * BATCH : (step + 1) * BATCH]]
        optimizer.zero_grad()
        loss = recipe.loss(model, torch.stack([data[i] for i in chosen]), config)
        loss.backward()
        length = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        assert (length > CLIP) == (step % 2 == 0)
        optimizer.step()
        assert scheduler is not None
        scheduler.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(180)
def test_unequal_shares_change_nothing(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        spec = write_spec(tmp_path, device="paced:0.01,3=0.02")
        traces = [tmp_path / f"{name}.trace" for name in SHARES]
        ranks = [start(processes, spec, r, {"POTLUCK_TRACE": str(traces[r])}) for r in range(3)]
        for rank in ranks:
            rank.succeeds(deadline_s=120)

    expected, losses = trained_by_hand()
    lines = read_lines(tmp_path / "steps.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["samples"] == SHARES for line in lines)
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-5)
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith("qkv.bias"):
            continue  # the keys' bias has no effect: its gradient is rounding, of which Adam makes whole steps
        difference = (found[name] - tensor).norm() / tensor.norm()
        assert difference < 1e-5, f"{name} differs by {difference:.2e}"

    # A step lasts as long as its slowest rank computes: 7 samples of 0.01 s, from step 3 on of 0.02 s. What one
    # oversleeps, on a busy machine, the next makes up for.
    for taken_s, least_s in zip(itertools.accumulate(line["step_s"] for line in lines), (0.07, 0.14, 0.28, 0.42)):
        assert taken_s >= 0.95 * least_s
    assert [line["ended_at"] for line in lines[1:]] == pytest.approx(
        [before["ended_at"] + line["step_s"] for before, line in itertools.pairwise(lines)]
    )
    for path, share in zip(traces, SHARES.values()):
        intervals = read_lines(path)
        assert sum(i["samples"] for i in intervals) == STEPS * share
        computed_s = sum(i["end"] - i["start"] for i in intervals)
        assert computed_s >= 0.95 * share * (2 * 0.01 + 2 * 0.02)


@pytest.mark.timeout(90)
def test_a_lost_rank_is_told_in_one_line(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        spec = write_spec(tmp_path, device="paced:0.02", steps=100_000)
        ranks = [start(processes, spec, r) for r in range(3)]
        out = tmp_path / "steps.jsonl"
        ranks[0].wait_until(lambda: out.exists() and len(out.read_bytes().splitlines()) > 1, 60, "a second step")
        ranks[2].kill()
        for rank, name in ((ranks[0], "desk"), (ranks[1], "laptop")):
            assert rank.wait(deadline_s=20) == 1
            assert "Traceback" not in rank.stderr()
            said = [line for line in rank.stderr().splitlines() if line.startswith("error: ")]
            assert len(said) == 1
            assert "DDP failed" in said[0]
            assert f"[{name}] [step " in said[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changes", "rank", "words"),
    [
        ({"shares": [6, 6, 0]}, 0, "'old': share is 0"),
        ({"shares": [6, 6, 6]}, 0, "the shares sum to 18, the batch is 12"),
        ({"recipe": {"name": "gtp", "config": {}}}, 0, "no recipe 'gtp'"),
        ({}, 3, "there is no rank 3"),
    ],
)
def test_a_wrong_spec_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], rank: int, words: str
) -> None:
    from potluck.lab.ddp_worker import main

    assert main(["--spec", str(write_spec(tmp_path, **changes)), "--rank", str(rank)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert words in said[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"members": []}'])
def test_a_file_that_is_no_spec_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    from potluck.lab.ddp_worker import main

    path = tmp_path / "spec.json"
    path.write_text(text)
    for file in (path, tmp_path / "missing.json"):
        assert main(["--spec", str(file), "--rank", "0"]) == 1
        assert capsys.readouterr().err.count("\n") == 1
