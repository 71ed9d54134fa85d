"""The recipe gpt: sizes, samples, learning, generated text, and clear errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from potluck.checked import build
from potluck.errors import ConfigError, DataError
from potluck.train.recipes import corpus, get
from potluck.train.recipes.gpt import GptConfig, GptRecipe, generate, readable

CPU = torch.device("cpu")
RECIPE = GptRecipe()
TEXT = b"".join(b"line %d of the text: the same words again and again\n" % number for number in range(400))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_bytes(TEXT)
    return str(tmp_path / "text.txt")


def count(config: GptConfig) -> int:
    with torch.device("meta"):
        model = RECIPE.model(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_follow_from_the_depth() -> None:
    assert count(GptConfig(depth=4)) == 3_323_392
    assert count(GptConfig(depth=12, sequence=1024, batch_tokens=8192)) == pytest.approx(124.5e6, rel=0.005)
    config = GptConfig(depth=3, sequence=32, batch_tokens=100)
    assert (config.width, config.global_batch, RECIPE.tokens_per_sample(config)) == (192, 3, 32)


def test_shapes_and_the_first_loss(text: str) -> None:
    config = GptConfig(depth=1, sequence=16, batch_tokens=64, data=text)
    model, data = RECIPE.model(config), RECIPE.dataset(config)
    batch = torch.stack(data.__getitems__([0, 5]))
    assert batch.dtype == torch.uint8
    assert batch.shape == (2, 17)
    assert model(batch[:, :-1].long()).shape == (2, 16, 256)
    assert RECIPE.loss(model, batch, config).item() == pytest.approx(np.log(256), abs=0.8)


def test_the_loss_is_the_mean_over_samples(text: str) -> None:
    config = GptConfig(depth=1, sequence=16, batch_tokens=64, data=text)
    model, data = RECIPE.model(config), RECIPE.dataset(config)
    both = RECIPE.loss(model, torch.stack(data.__getitems__([1, 2])), config)
    each = [RECIPE.loss(model, data[index].unsqueeze(0), config) for index in (1, 2)]
    torch.testing.assert_close(both, sum(each) / 2)


def test_no_position_sees_what_comes_later() -> None:
    model = RECIPE.model(GptConfig(depth=2, sequence=16, batch_tokens=16))
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] += 1
    changed %= 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_few_steps_lower_the_loss_and_validation(text: str) -> None:
    config = GptConfig(depth=1, sequence=32, batch_tokens=256, steps=60, warmup=5, data=text)
    model, data = RECIPE.model(config), RECIPE.dataset(config)
    optimizer = RECIPE.optimizer(model, config)
    scheduler = RECIPE.scheduler(optimizer, config)
    before = RECIPE.validation(model, config, CPU)
    losses = []
    for step in range(config.steps):
        batch = torch.stack(data.__getitems__([(8 * step + i) % len(data) for i in range(8)]))
        loss = RECIPE.loss(model, batch, config)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    after = RECIPE.validation(model, config, CPU)
    assert losses[0] > 5
    assert np.mean(losses[-5:]) < 2
    assert before is not None
    assert after is not None
    assert after < before / 2
    assert model.training
    written = RECIPE.finish(model, config, CPU)
    assert len(written) > 250
    assert written == RECIPE.finish(model, config, CPU)


def test_the_learning_rate_rises_and_falls() -> None:
    config = GptConfig(depth=1, sequence=16, batch_tokens=16, steps=50, warmup=10, lr=1.0)
    optimizer = RECIPE.optimizer(RECIPE.model(config), config)
    scheduler = RECIPE.scheduler(optimizer, config)
    rates = []
    for _ in range(config.steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[:11] == sorted(rates[:11])
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.11
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_only_matrices_decay() -> None:
    config = GptConfig(depth=1, sequence=16, batch_tokens=16)
    model = RECIPE.model(config)
    decayed, others = RECIPE.optimizer(model, config).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_the_same_seed_gives_the_same_model_and_leaves_chance_alone() -> None:
    config = GptConfig(depth=1, sequence=16, batch_tokens=16)
    torch.manual_seed(5)
    one = RECIPE.model(config)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    two, other = RECIPE.model(config), RECIPE.model(replace(config, seed=2))
    for first, second in zip(one.parameters(), two.parameters()):
        assert torch.equal(first, second)
    assert not torch.equal(one.bytes.weight, other.bytes.weight)


def test_bf16_is_the_configs_choice(text: str) -> None:
    config = GptConfig(depth=1, sequence=16, batch_tokens=64, data=text)
    model, batch = RECIPE.model(config), torch.stack(RECIPE.dataset(config).__getitems__([0, 1]))
    exact = RECIPE.loss(model, batch, config)
    rounded = RECIPE.loss(model, batch, replace(config, precision="bf16"))
    assert rounded.dtype == torch.float32
    assert exact != rounded
    torch.testing.assert_close(exact, rounded, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generation_goes_on_beyond_the_context(temperature: float) -> None:
    config = GptConfig(depth=1, sequence=8, batch_tokens=8, temperature=temperature)
    written = generate(RECIPE.model(config), b"def ", config, CPU)
    assert written.startswith(b"def ")
    assert len(written) == 304


def test_what_cannot_be_printed_becomes_visible() -> None:
    assert readable(b"a\tb\n\x1b[2J\x00\x7f\xff\xc3\xa9") == "a\tb\n\u241b[2J\u2400\ufffd\ufffdé"


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"sequence": -1},
        {"steps": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"weight_decay": -0.1},
        {"clip_norm": float("nan")},
        {"sequence": 256, "batch_tokens": 128},
    ],
)
def test_values_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(GptConfig, wrong)
    assert next(iter(wrong)) in str(caught.value) or "batch_tokens" in str(caught.value)
    assert caught.value.hint


def test_the_standard_library_is_a_corpus() -> None:
    config = GptConfig()
    data = RECIPE.dataset(config)
    assert len(data) * config.sequence > 3_000_000
    whole = corpus.stdlib_corpus()
    assert len(whole) <= corpus.STDLIB_CAP_BYTES
    sample = bytes(whole.read(0, len(whole)))
    assert sample.count(b"def ") > 1000
    assert get("gpt").dataset(config)[0].tolist() == list(sample[: config.sequence + 1])


def test_every_byte_is_a_target_once_and_the_tail_is_held_out(text: str) -> None:
    whole = corpus.open_corpus(text)
    training, held_out = corpus.split(whole, sequence=10, needed=1)
    seen = b"".join(bytes(window[1:].tolist()) for window in training)
    assert TEXT[1:].startswith(seen)
    assert len(seen) == pytest.approx(0.95 * len(TEXT), abs=12)
    tail = b"".join(bytes(window.tolist()[1:]) for window in held_out)
    assert tail in TEXT[len(seen) + 1 :]
    assert len(tail) > 0.04 * len(TEXT)


def test_a_folder_is_read_as_one_text_without_copies(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b" / "c.txt").write_bytes(b"second")
    (tmp_path / "d.txt").write_bytes(b"third")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / ".git" / "HEAD").write_bytes(b"hidden")
    whole = corpus.open_corpus(str(tmp_path))
    assert len(whole) == 16
    for start in range(16):
        for stop in range(start, 17):
            assert bytes(whole.read(start, stop)) == b"firstsecondthird"[start:stop]
    assert all(isinstance(part, Path) for part in whole.parts)
    assert isinstance(corpus._map(tmp_path / "a.txt"), np.memmap)


def test_data_that_is_missing_empty_or_short_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "short").write_bytes(b"x" * 900)
    for name, words in (
        ("missing", "there is no file or folder"),
        ("empty", "is empty"),
        ("nothing", "holds no text file"),
        ("short", r"has 900 bytes, 6 samples of 128 to train on; one step takes 16"),
    ):
        config = GptConfig(data=str(tmp_path / name), batch_tokens=2048)
        with pytest.raises(DataError, match=words) as caught:
            RECIPE.dataset(config)
        assert caught.value.hint
    with pytest.raises(DataError):
        RECIPE.validation(nn.Identity(), GptConfig(data=str(tmp_path / "short")), CPU)


def test_windows_outside_the_text_are_no_windows(text: str) -> None:
    data = RECIPE.dataset(GptConfig(depth=1, sequence=16, batch_tokens=64, data=text))
    for index in (-1, len(data)):
        with pytest.raises(IndexError):
            data[index]


def test_a_seed_beyond_what_torch_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed is 1000"):
        build(GptConfig, {"seed": 10**30})


def test_what_may_not_be_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/1/cwd, below which even a stat is refused."""
    (tmp_path / "text").write_bytes(b"x" * 5000)
    (tmp_path / "locked").write_bytes(b"x" * 5000)
    stat = os.stat

    def refusing(path: Any, *given: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *given, **more)

    monkeypatch.setattr(os, "stat", refusing)
    assert len(corpus.open_corpus(str(tmp_path))) == 5000
