"""Recipes by name and their configs from words: nearest names, types, documented fields."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from potluck import checked
from potluck.errors import ConfigError
from potluck.train.recipes import NAMES, RecipeConfig, get
from support.field_docs import field_docs


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_complete(name: str) -> None:
    recipe = get(name)
    assert recipe.name == name
    settings: Any = recipe.Config()
    for common in (n for n in vars(RecipeConfig) if not n.startswith("_")):
        assert hasattr(settings, common), common
    docs = field_docs(recipe.Config)
    assert list(recipe.Config.__struct_fields__) == list(docs)
    assert all(text.endswith(".") for text in docs.values())
    with pytest.raises(TypeError):
        recipe.Config(3)
    with pytest.raises(AttributeError):
        settings.seed = 3
    assert recipe.Config(**json.loads(checked.to_json(settings))) == settings


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no recipe 'gtp'") as caught:
        get("gtp")
    assert "did you mean gpt?" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        get("my/train.py")
    assert "potluck host my/train.py" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        get("../../etc")
    assert "did you mean" not in caught.value.hint
    assert all(name in caught.value.hint for name in NAMES)


def test_a_config_is_made_from_words() -> None:
    gpt = get("gpt").Config
    words = {"depth": "3", "batch-tokens": 8192.0, "lr": "2e-3", "data": "x", "precision": "bf16"}
    made = checked.build(gpt, words)
    assert made == gpt(depth=3, batch_tokens=8192, lr=2e-3, data="x", precision="bf16")
    assert checked.build(gpt, {"lr": None, "data": None}) == gpt()


@pytest.mark.parametrize(
    ("values", "what", "hint"),
    [
        ({"dept": 3}, "no key 'dept'", "did you mean depth?"),
        ({"zzz": 3}, "no key 'zzz'", "valid: batch_tokens, clip_norm"),
        ({"depth": "four"}, "depth is 'four'", "a whole number"),
        ({"depth": 2.5}, "depth is 2.5", "a whole number"),
        ({"depth": True}, "depth is True", "a whole number"),
        ({"depth": None}, "depth is None", "a whole number"),
        ({"depth": float("inf")}, "depth is inf", "a whole number"),
        ({"lr": "fast"}, "lr is 'fast'", "a number"),
        ({"data": 3}, "data is 3", "text"),
        ({"precision": "bf61"}, "precision is 'bf61'", "did you mean bf16?"),
    ],
)
def test_words_that_are_wrong_are_refused(values: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked.build(get("gpt").Config, values)
    assert what in str(caught.value)
    assert hint in caught.value.hint


def test_the_list_of_recipes_needs_no_torch() -> None:
    script = "import sys, potluck.train.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=50).returncode == 0
