"""The strategies hivemind and torchft, where the extra `peers` is installed: real processes on loopback."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from potluck.lab import peer_strategies
from potluck.train.recipes import get
from support.processes import Processes, TestProcess
from support.worker_specs import write_worker_spec

STEPS, SEED = 4, 3
SHARES = {"desk": 7, "laptop": 3}
BATCH = sum(SHARES.values())
CLIP = 3.5
CONFIG = {"depth": 1, "sequence": 16, "batch_tokens": 16 * BATCH, "steps": STEPS, "seed": SEED}
CONFIG |= {"lr": 1e-3, "clip_norm": CLIP}
DEADLINE_S = 75


def needs(name: str) -> None:
    reason = peer_strategies.available()[name]
    if reason is not None:
        pytest.skip(reason)


def write_spec(folder: Path, devices: tuple[str, str], **changes: Any) -> Path:
    members = [
        {"name": name, "device": device, "micro_batch": 2, "share": share}
        for (name, share), device in zip(SHARES.items(), devices)
    ]
    return write_worker_spec(folder, CONFIG, members, **{"steps": STEPS, "seed": SEED, **changes})


def start(processes: Processes, strategy: str, spec: Path) -> list[TestProcess]:
    ranks = range(len(SHARES))
    return [processes.python(*peer_strategies.command(strategy, spec, rank), name=f"rank-{rank}") for rank in ranks]


def trained_by_hand() -> tuple[dict[str, Tensor], list[float]]:
    """One process, whole batches; and each step's loss."""
    recipe = get("gpt")
    config = recipe.Config(**CONFIG)
    model, data = recipe.model(config), recipe.dataset(config)
    optimizer = recipe.optimizer(model, config)
    scheduler = recipe.scheduler(optimizer, config)
    assert scheduler is not None
    order = np.random.Generator(np.random.PCG64([SEED, 0])).permutation(len(data))  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        chosen = [int(i) for i in order[step * BATCH : (step + 1) * BATCH]]
        optimizer.zero_grad()
        loss = recipe.loss(model, torch.stack([data[i] for i in chosen]), config)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative; the keys' bias has no effect: its gradient is rounding, of which Adam makes whole steps."""
    return {
        name: float((found[name] - tensor).norm() / tensor.norm())
        for name, tensor in expected.items()
        if not name.endswith("qkv.bias")
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_torchft_with_unequal_shares_is_what_one_process_does(tmp_path: Path) -> None:
    needs("torchft")
    with Processes(tmp_path / "logs") as processes:
        for rank in start(processes, "torchft", write_spec(tmp_path, ("paced:0.01", "paced:0.02"))):
            rank.succeeds(DEADLINE_S)
    expected, losses = trained_by_hand()
    lines = read_lines(tmp_path / "steps.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["samples"] == SHARES for line in lines)
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-5)
    assert sum(line["step_s"] for line in lines) >= 0.95 * 4 * 7 * 0.01  # a late step's successor makes up for it
    assert max(differences(load_file(tmp_path / "weights.safetensors"), expected).values()) < 1e-5


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_hivemind_averages_about_the_global_batch(tmp_path: Path) -> None:
    needs("hivemind")
    with Processes(tmp_path / "logs") as processes:
        for rank in start(processes, "hivemind", write_spec(tmp_path, ("paced:0.2", "paced:0.4"))):
            rank.succeeds(DEADLINE_S)
    lines = read_lines(tmp_path / "steps.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert set(line["samples"]) == set(SHARES), "a step was made without the guest"
        assert 0.7 * BATCH <= sum(line["samples"].values()) <= 1.6 * BATCH
    # Nearly the same samples, so nearly the same training; fp16 and a sample more or less are the difference.
    expected, losses = trained_by_hand()
    assert lines[0]["loss"] == pytest.approx(losses[0], abs=0.1)
    untrained = get("gpt").model(get("gpt").Config(**CONFIG)).state_dict()
    found = load_file(tmp_path / "weights.safetensors")
    moved = sum(float((expected[name] - untrained[name]).square().sum()) for name in expected)
    apart = sum(float((expected[name] - found[name]).square().sum()) for name in expected)
    assert apart < 0.5 * moved


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_hivemind_told_to_end_leaves_no_process(tmp_path: Path) -> None:
    needs("hivemind")
    spec = write_spec(tmp_path, ("paced:0.2", "paced:0.4"), steps=1000)
    with Processes(tmp_path / "logs") as processes:
        ranks = start(processes, "hivemind", spec)
        out = tmp_path / "steps.jsonl"
        ranks[0].wait_until(lambda: out.exists() or None, DEADLINE_S, "a step")
        family = [child for rank in ranks for child in psutil.Process(rank.pid).children(recursive=True)]
        assert any("p2pd" in child.name() for child in family)
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        for rank in ranks:
            rank.exits_with(128 + signal.SIGTERM, 10)
        assert psutil.wait_procs(family, timeout=5)[1] == []
