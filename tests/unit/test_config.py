"""Configs from words: values become the field's type, mistakes become errors that say what to type instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import Struct

from potluck.checked import build, nearest
from potluck.cli._options import read_config_file
from potluck.errors import ConfigError
from potluck.spec.config import RunConfig
from support.field_docs import field_docs


class Example(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Has a field of each kind."""

    depth: int = 4
    """How deep."""
    lr: float | None = None
    """Optional,
    over two lines."""
    data: str | None = None
    mode: Literal["train", "eval"] = "train"
    """One of two."""


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("depth", "12", 12),
        ("depth", 12, 12),
        ("depth", 12.0, 12),
        ("depth", "-3", -3),
        ("depth", 2**63 + 1, 2**63 + 1),
        ("depth", str(2**63 + 1), 2**63 + 1),
        ("lr", "3e-4", 3e-4),
        ("lr", 1, 1.0),
        ("lr", "inf", float("inf")),
        ("lr", None, None),
        ("data", "some/path", "some/path"),
        ("mode", "eval", "eval"),
    ],
)
def test_values_become_the_type_of_their_field(key: str, value: Any, expected: Any) -> None:
    got = getattr(build(Example, {key: value}), key)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("depth", "four", "depth must be a whole number"),
        ("depth", "4.5", "depth must be a whole number"),
        ("depth", 4.5, "depth must be a whole number"),
        ("depth", True, "depth must be a whole number"),
        ("depth", None, "depth must be a whole number"),
        ("depth", [4], "depth must be a whole number"),
        ("depth", float("inf"), "depth must be a whole number"),
        ("depth", float("nan"), "depth must be a whole number"),
        ("lr", "fast", "lr must be a number"),
        ("lr", "nan", "lr must be a number"),
        ("lr", False, "lr must be a number"),
        ("data", 3, "data must be text"),
        ("mode", "evil", "did you mean eval? mode is one of eval, train"),
        ("mode", 3, "mode is one of eval, train"),
    ],
)
def test_a_wrong_value_says_what_the_field_takes(key: str, value: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Example, {key: value})
    assert caught.value.hint == hint
    assert str(caught.value).startswith(f"{key} is {value!r}")
    assert caught.value.exit_status == 2


def test_an_unknown_key_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Example, {"dept": 3})
    assert caught.value.path == ("dept",)
    assert caught.value.hint == "did you mean depth? valid: data, depth, lr, mode"
    with pytest.raises(ConfigError) as caught:
        build(Example, {"zzzz": 3})
    assert "did you mean" not in caught.value.hint


def test_dashes_are_underscores() -> None:
    assert build(RunConfig, {"micro-batch": "8", "checkpoint-every": 5}) == RunConfig(
        micro_batch=8, checkpoint_every=5
    )


def test_nearest_names_all() -> None:
    assert nearest("non", ["int8", "none"]) == "did you mean none? valid: int8, none"
    assert nearest("qqq", ["b", "a"]) == "valid: a, b"


def test_the_words_under_a_field_are_its_help() -> None:
    assert field_docs(Example) == {"depth": "How deep.", "lr": "Optional,\nover two lines.", "mode": "One of two."}
    assert field_docs(RunConfig).keys() == set(RunConfig.__struct_fields__)


def test_the_defaults_of_a_run_are_sound() -> None:
    config = build(RunConfig, {})
    assert config == RunConfig()
    assert config.codec == "auto"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threads", 0),
        ("micro_batch", 0),
        ("micro_batch", -3),
        ("port", -1),
        ("port", 65536),
        ("wait_for", -1),
        ("wait_s", -0.5),
        ("checkpoint_every", -1),
    ],
)
def test_numbers_out_of_range_are_refused_also_from_a_file(key: str, value: Any) -> None:
    """On the command line click says so; a TOML file has nobody else to ask."""
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, {key: value})
    assert caught.value.path == (key,)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("[run]\nport = 70000\n", "c.toml:2: run: port is 70000", "from 0 to 65535"),
        ('[run]\nseed = 1\n[gpt]\n\ndepth = "deep"\n', "c.toml:2: run: there is no key 'seed'", "valid: "),
        ('[run]\n[gpt]\n\ndepth = "deep"\n', "c.toml:4: gpt: depth is 'deep'", "a whole number, 1 or more"),
        ("[gptt]\ndepth = 1\n", "c.toml:1: there is no key 'gptt'", "did you mean gpt?"),
        ("run = 3\n", "c.toml:1: run is 3", "a table"),
    ],
)
def test_a_wrong_line_of_a_config_file_is_named(tmp_path: Path, text: str, what: str, hint: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file, "gpt")
    assert caught.value.what == f"{tmp_path}/{what}"
    assert hint in caught.value.hint


def test_what_a_flag_may_still_mend_is_no_mistake_of_the_file(tmp_path: Path) -> None:
    """A sample longer than the default batch: --batch-tokens may follow."""
    file = tmp_path / "c.toml"
    file.write_text("[gpt]\nsequence = 8192\n")
    assert read_config_file(file, "gpt") == ({}, {"sequence": 8192})
