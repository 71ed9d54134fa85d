"""Checkpoints: bit-exact round trips, consistency beside training, and what does not fit is named."""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from potluck.errors import CheckpointError, PotluckError, UserError
from potluck.train import checkpoint
from potluck.train.checkpoint import CheckpointWriter, Snapshot, load_latest, save
from potluck.train.saved_place import SavedPlace
from support.small_checkpoints import linear, names_in, save_linear, sgd

pytestmark = pytest.mark.usefixtures("one_thread")


class Tied(nn.Module):
    """Tied embedding and head, BatchNorm buffers, a bf16 layer, dropout: all that is awkward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.small = nn.Linear(8, 8).bfloat16()
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = self.drop(self.small(x.bfloat16()).float())
        return self.head(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def tensor_lr(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> None:
    for _ in range(steps):
        tokens = torch.randint(0, 11, (6,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Equal to the bit, with the same types all the way down."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), path
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert type(one) is type(other), path
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other)):
            assert_same(*pair, path=f"{path}.{index}")
    else:
        assert one == other, path


@pytest.mark.parametrize("make_optimizer", [adamw, sgd, tensor_lr])
def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path, make_optimizer: Any) -> None:
    torch.manual_seed(3)
    model = Tied()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    train(model, optimizer, 3, scheduler)
    save(tmp_path, Snapshot(step=3, model=model, optimizer=optimizer, objects={"scheduler": scheduler}))
    at_save = state_of(model, optimizer)
    train(model, optimizer, 4, scheduler)
    straight = state_of(model, optimizer)

    torch.manual_seed(99)
    other = Tied()
    other_optimizer = make_optimizer(other)
    other_scheduler = torch.optim.lr_scheduler.MultiStepLR(other_optimizer, [2, 4])
    loaded = load_latest(tmp_path)
    assert loaded is not None
    loaded.restore(other, other_optimizer, {"scheduler": other_scheduler})
    assert loaded.step == 3
    assert_same(at_save, state_of(other, other_optimizer))
    train(other, other_optimizer, 4, other_scheduler)
    assert_same(straight, state_of(other, other_optimizer))
    assert type(other_scheduler.milestones) is type(scheduler.milestones)


def test_a_state_keeps_its_number_format_on_a_bf16_parameter(tmp_path: Path) -> None:
    class Fp32Momentum(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["average"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)

    model = nn.Linear(3, 3).bfloat16()
    optimizer = Fp32Momentum(model.parameters())
    optimizer.step()
    save(tmp_path, Snapshot(step=1, model=model, optimizer=optimizer))
    fresh = Fp32Momentum(model.parameters())
    loaded = load_latest(tmp_path)
    assert loaded is not None
    loaded.restore(model, fresh, {})
    assert_same(optimizer.state_dict(), fresh.state_dict())


def test_weights_are_readable_with_safetensors_alone_and_tied_ones_stored_once(tmp_path: Path) -> None:
    model = Tied()
    path = save(tmp_path, Snapshot(step=7, model=model, optimizer=sgd(model)))
    assert path.name == "step-00000007"
    assert names_in(path) == ["manifest.json", "optimizer-000.safetensors", "weights-000.safetensors"]
    weights = load_file(path / "weights-000.safetensors")
    state = dict(model.state_dict())
    assert "head.weight" not in weights
    assert json.loads((path / "manifest.json").read_text())["weights"]["tensors"]["head.weight"] == (
        "same as embed.weight"
    )
    for name, tensor in weights.items():
        assert_same(state.pop(name), tensor, name)
    assert list(state) == ["head.weight"]


def test_optimizer_tensors_are_named_by_index_and_key(tmp_path: Path) -> None:
    model, _ = linear()
    optimizer = adamw(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = save(tmp_path, Snapshot(step=1, model=model, optimizer=optimizer))
    with safe_open(path / "optimizer-000.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(
            f"state.{index}.{key}" for index in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")
        )


def test_large_states_are_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 200)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))  # weights of 144 bytes, biases of 24
    optimizer = adamw(model)
    path = save(tmp_path, Snapshot(step=1, model=model, optimizer=optimizer))
    assert [name for name in names_in(path) if name.startswith("weights")] == [
        f"weights-{number:03d}.safetensors" for number in range(3)
    ]
    other = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    loaded = load_latest(tmp_path)
    assert loaded is not None
    loaded.restore(other, adamw(other), {})
    assert_same(dict(model.state_dict()), dict(other.state_dict()))


def test_views_of_one_memory_and_transposed_weights(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    flat = torch.arange(12.0)
    model.weight = nn.Parameter(flat[:9].view(3, 3).t())
    model.bias = nn.Parameter(flat[9:])
    save(tmp_path, Snapshot(step=1, model=model, optimizer=sgd(model)))
    other = nn.Linear(3, 3)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    loaded.restore(other, sgd(other), {})
    assert_same(dict(model.state_dict()), dict(other.state_dict()))


def test_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)
    np.random.normal()
    device_rng = {"cuda:0": torch.arange(16, dtype=torch.uint8)}
    save_linear(tmp_path, 1, device_rng=device_rng)
    expected = (random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(3))
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    loaded.restore(*linear(), {})
    found = (random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(3))
    assert_same(expected, found)
    assert_same(device_rng, loaded.device_rng)


def test_objects_come_back_as_they_were(tmp_path: Path) -> None:
    class Keeper:
        def __init__(self, state: dict[str, Any]) -> None:
            self.state = state

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any], /) -> None:
            self.state = state

    state = {
        "a.b": torch.arange(3),
        "a": {"b": torch.ones(2, dtype=torch.bool), 3: [None, (1, 2.5), float("-inf")]},
        "empty": {},
        "$odd": "text",
    }
    save_linear(tmp_path, 1, objects={"keeper": Keeper(state)})
    loaded = load_latest(tmp_path)
    assert loaded is not None
    keeper = Keeper({})
    loaded.restore(*linear(), {"keeper": keeper})
    assert_same(state, keeper.state)


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    class Keeper:
        def state_dict(self) -> dict[str, Any]:
            return {"outer": {"inner": {1, 2}}}

        def load_state_dict(self, state: dict[str, Any], /) -> None: ...

    with pytest.raises(
        UserError, match=r"'average\.outer\.inner' of the object 'average': it is of type set"
    ) as caught:
        save_linear(tmp_path, 1, objects={"average": Keeper()})
    assert caught.value.hint
    model = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(UserError, match=r"'weight' of the model: it is a tensor of torch\.complex128"):
        save(tmp_path, Snapshot(step=1, model=model, optimizer=sgd(model)))


def test_a_checkpoint_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    save_linear(tmp_path, 1)
    wrong = SavedPlace(samples=-1, global_batch=None, seed=0)
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"a value of this run: .*\$\.place\.samples"):
        save(tmp_path, Snapshot(step=2, model=model, optimizer=sgd(model), place=wrong))
    assert names_in(tmp_path) == ["step-00000001"]
    assert load_latest(tmp_path) is not None


def test_what_does_not_fit_is_named_with_both_values_and_nothing_is_touched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = adamw(model)
    save(tmp_path, Snapshot(step=1, model=model, optimizer=optimizer, objects={"scheduler": optimizer}))
    loaded = load_latest(tmp_path)
    assert loaded is not None

    def refused(other: nn.Module, its_optimizer: torch.optim.Optimizer, objects: Any, words: str) -> None:
        before = state_of(other, its_optimizer)
        with pytest.raises(CheckpointError, match=words) as caught:
            loaded.restore(other, its_optimizer, objects)
        assert caught.value.hint
        assert_same(before, state_of(other, its_optimizer))

    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    refused(
        wider,
        adamw(wider),
        {},
        r"1\.weight is float32 \[2, 4\] there and float32 \[3, 4\] here",
    )
    longer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    refused(longer, adamw(longer), {}, r"2\.weight is missing there")
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    refused(half, adamw(half), {}, "bfloat16")
    same = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    refused(same, sgd(same), {}, "the optimizer's class is AdamW there and SGD here")
    refused(same, adamw(same[0]), {}, "parameter 2 of group 0")
    refused(same, adamw(same), {}, "the object scheduler is present there and missing here")


class Gate:
    """Stands in for writing a file: stops at the first one until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self._write = checkpoint.save_file
        monkeypatch.setattr(checkpoint, "save_file", self.write)
        monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1)

    def write(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.open.wait(20)
        self._write(*arguments)


def test_an_object_that_cannot_take_its_state_is_named(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        def load_state_dict(self, *args: Any, **more: Any) -> Any:
            raise KeyError("old_name")

    model = nn.Linear(2, 2)
    save(tmp_path, Snapshot(step=1, model=model, optimizer=sgd(model), objects={"average": nn.Linear(2, 2)}))
    loaded = load_latest(tmp_path)
    assert loaded is not None
    with pytest.raises(CheckpointError, match=r"average.*old_name") as misfit:
        loaded.restore(model, sgd(model), {"average": Renamed(2, 2)})
    assert (misfit.value.code, misfit.value.step) == ("bad-checkpoint", 1)


def test_weights_changed_while_a_slow_disk_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = tensor_lr(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 2, scheduler)
    gate = Gate(monkeypatch)
    saved: list[tuple[int, Path, float]] = []
    writer = CheckpointWriter(tmp_path, on_saved=lambda *what: saved.append(what))
    expected, schedule = state_of(model, optimizer), copy.deepcopy(scheduler.state_dict())
    snapshot = Snapshot(step=2, model=model, optimizer=optimizer, objects={"scheduler": scheduler})
    assert writer.start(snapshot)
    assert gate.reached.wait(20)
    with torch.no_grad():
        model.norm.running_mean.add_(1)  # the next forward does this, before the update
        optimizer.param_groups[0]["lr"].mul_(3)  # and a schedule may do that
    assert writer.before_update() >= 0
    train(model, optimizer, 2, scheduler)
    assert not writer.start(snapshot)
    assert not saved
    gate.open.set()
    writer.wait()
    assert [(step, path.name) for step, path, _ in saved] == [(2, "step-00000002")]

    other = Tied()
    other_optimizer = tensor_lr(other)
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.5)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    loaded.restore(other, other_optimizer, {"scheduler": other_scheduler})
    assert_same(expected, state_of(other, other_optimizer))
    assert_same(schedule, other_scheduler.state_dict())


def test_only_what_is_not_read_yet_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    copied: list[str] = []
    copying = checkpoint._copied
    monkeypatch.setattr(
        checkpoint,
        "_copied",
        lambda *arguments: (copied.append(threading.current_thread().name), copying(*arguments))[1],
    )
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    writer = CheckpointWriter(tmp_path)
    assert writer.start(Snapshot(step=1, model=model, optimizer=sgd(model)))
    assert gate.reached.wait(20)
    writer.before_update()
    assert copied == ["potluck-checkpoint"] + [threading.current_thread().name] * 5
    assert writer.before_update() < 0.01
    gate.open.set()
    writer.wait()
    assert len(copied) == 6


def test_every_checkpoint_written_beside_a_training_is_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 5_000)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(6)))
    optimizer = adamw(model)
    expected: dict[int, dict[str, Any]] = {}
    written: list[int] = []
    writer = CheckpointWriter(tmp_path, keep=1000, on_saved=lambda step, *_: written.append(step))
    deadline = time.monotonic() + 30
    for step in itertools.count(1):
        if len(expected) == 5 or time.monotonic() > deadline:
            break
        optimizer.zero_grad()
        model(torch.rand(8, 30)).square().mean().backward()
        writer.before_update()
        optimizer.step()
        if writer.start(Snapshot(step=step, model=model, optimizer=optimizer)):
            expected[step] = state_of(model, optimizer)
    writer.close()
    assert written == list(expected)
    assert len(written) == 5
    assert written[-1] > 5  # training went on while they were written
    for step in written:
        path = tmp_path / f"step-{step:08d}"
        found: dict[str, Tensor] = {}
        for file in path.glob("weights-*"):
            found.update(load_file(file))
        assert_same({name: found[name] for name in expected[step]["model"]}, dict(expected[step]["model"]))
        moments: dict[str, Tensor] = {}
        for file in path.glob("optimizer-*"):
            moments.update(load_file(file))
        for index, entry in expected[step]["optimizer"]["state"].items():
            for key, value in entry.items():
                assert_same(value, moments[f"state.{index}.{key}"])


def test_a_failure_in_the_callers_callback_is_not_lost(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise PotluckError("the event log is gone")

    writer = CheckpointWriter(tmp_path, on_saved=fail)
    model, optimizer = linear()
    writer.start(Snapshot(step=1, model=model, optimizer=optimizer))
    with pytest.raises(PotluckError, match="event log"):
        writer.close()
