"""The recipe cnn: the digits of scikit-learn, MNIST's files, learning, and clear errors."""

from __future__ import annotations

import builtins
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from potluck.checked import build
from potluck.errors import ConfigError, DataError
from potluck.train.recipes import cnn, idx
from potluck.train.recipes.cnn import CnnConfig, CnnRecipe

CPU = torch.device("cpu")
RECIPE = CnnRecipe()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.set_num_threads(1)
    cnn._load.cache_clear()


def write_idx(file: Path, array: np.ndarray) -> None:
    raw = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(raw) if file.suffix == ".gz" else raw)


def write_mnist(folder: Path, *, prefix: str = "train", count: int = 12, ending: str = "") -> np.ndarray:
    images = np.arange(count * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(count, 28, 28)
    folder.mkdir(parents=True, exist_ok=True)
    write_idx(folder / f"{prefix}-images-idx3-ubyte{ending}", images)
    write_idx(folder / f"{prefix}-labels-idx1-ubyte{ending}", (np.arange(count) % 10).astype(np.uint8))
    return images


def test_digits_are_learnt() -> None:
    pytest.importorskip("sklearn")
    config = CnnConfig(steps=60, width=8, global_batch=32)
    model, data = RECIPE.model(config), RECIPE.dataset(config)
    assert len(data) == 1498
    image, label = data[0]
    assert (image.shape, image.dtype, label.dtype) == ((8, 8), torch.uint8, torch.int64)
    optimizer = RECIPE.optimizer(model, config)
    scheduler = RECIPE.scheduler(optimizer, config)
    order = np.random.default_rng(0).permutation(len(data))
    losses = []
    for step in range(config.steps):
        chosen = [int(order[(32 * step + i) % len(data)]) for i in range(32)]
        loss = RECIPE.loss(model, default_collate(data.__getitems__(chosen)), config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(10), abs=0.3)
    assert np.mean(losses[-5:]) < 0.5
    accuracy = RECIPE.validation(model, config, CPU)
    assert accuracy is not None
    assert accuracy > 0.9
    assert f"{100 * accuracy:.1f} %" in RECIPE.finish(model, config, CPU)
    assert model.training
    assert RECIPE.tokens_per_sample(config) is None


def test_without_scikit_learn_the_hint_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return really(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="scikit-learn, which is not installed") as caught:
        RECIPE.dataset(CnnConfig())
    assert ".[digits]" in caught.value.hint


@pytest.mark.parametrize(("place", "ending"), [("", ""), ("", ".gz"), ("MNIST/raw", "")])
def test_mnist_files_plain_or_gzipped(tmp_path: Path, place: str, ending: str) -> None:
    images = write_mnist(tmp_path / place, ending=ending)
    write_mnist(tmp_path / place, prefix="t10k", count=7, ending=ending)
    config = CnnConfig(data=str(tmp_path))
    data = RECIPE.dataset(config)
    assert len(data) == 12
    image, label = data[11]
    assert np.array_equal(image.numpy(), images[11])
    assert label.item() == 1
    model = RECIPE.model(config)
    assert RECIPE.loss(model, default_collate(data.__getitems__([0, 3])), config).isfinite()
    accuracy = RECIPE.validation(model, config, CPU)
    assert accuracy is not None
    assert accuracy * 7 == pytest.approx(round(accuracy * 7))


def test_without_a_test_set_every_sixth_is_held_out(tmp_path: Path) -> None:
    write_mnist(tmp_path, count=12)
    training, held_out = cnn._load(str(tmp_path))
    assert [int(label) for _, label in training.__getitems__(range(10))] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 0]
    assert [int(label) for _, label in held_out.__getitems__(range(2))] == [5, 1]
    with pytest.raises(IndexError):
        training[10]


def test_files_that_are_missing_or_damaged_are_clear_errors(tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(DataError, match=words) as caught:
            idx.read_mnist(tmp_path / "mnist")
        assert caught.value.hint

    refused("there is no folder")
    (tmp_path / "mnist").mkdir()
    refused("holds no MNIST files")
    write_mnist(tmp_path / "mnist")
    images, labels = (tmp_path / "mnist" / f"train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    refused(r"damaged: 9,407 bytes for 12 x 28 x 28")
    images.write_bytes(b"<html>" + whole)
    refused("it starts with 3c 68 74 6d, expected 00 00 08 03")
    images.write_bytes(b"")
    refused("it starts with nothing")
    images.unlink()
    refused("has no train-images-idx3-ubyte")
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole)[:-20])
    refused("cannot read")
    write_idx(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", np.zeros((3, 28, 28), np.uint8))
    refused("3 images and .* 12 labels")
    write_idx(labels, np.array([1, 2, 11], np.uint8))
    refused("the label 11")
    write_idx(labels, np.array([1, 2, 3], np.uint8))
    write_idx(tmp_path / "mnist" / "t10k-images-idx3-ubyte", np.zeros((2, 14, 14), np.uint8))
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte", np.zeros(2, np.uint8))
    refused(r"training images are \(28, 28\) and test images \(14, 14\)")


def test_a_batch_split_in_any_way_gives_the_same_gradient() -> None:
    config = CnnConfig(width=8)
    model = RECIPE.model(config)
    images, labels = torch.randint(0, 256, (6, 8, 8), dtype=torch.uint8), torch.arange(6)

    def gradient(sizes: list[int]) -> torch.Tensor:
        model.zero_grad()
        for part, answers in zip(images.split(sizes), labels.split(sizes)):
            (RECIPE.loss(model, [part, answers], config) * len(part) / 6).backward()
        return nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])

    torch.testing.assert_close(gradient([6]), gradient([1, 2, 3]), rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_model() -> None:
    one, two = RECIPE.model(CnnConfig()), RECIPE.model(CnnConfig())
    other = RECIPE.model(CnnConfig(seed=2))
    for first, second in zip(one.parameters(), two.parameters()):
        assert torch.equal(first, second)
    assert not torch.equal(one.features[0].weight, other.features[0].weight)


@pytest.mark.parametrize("wrong", [{"width": 6}, {"width": 0}, {"steps": 0}, {"lr": -1.0}, {"clip_norm": -1.0}])
def test_values_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        build(CnnConfig, wrong)
    assert caught.value.hint
