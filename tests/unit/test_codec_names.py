"""Names of codecs: those there are, those there are not, and what a person reads then."""

from __future__ import annotations

import subprocess
import sys

import pytest

import potluck.codec
from potluck.codec import NAMES, get, names
from potluck.errors import ConfigError


@pytest.mark.parametrize("name", [*NAMES, "topk:0.05", "topk:0.125", "topk:1e-06"])
def test_a_name_can_travel(name: str) -> None:
    assert get(name).name == name
    assert get(get(name).name).nbytes(12_345) == get(name).nbytes(12_345)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("topk:0.01", "topk"),
        ("topk:1", "topk:1.0"),
        ("INT4", "int4"),
        (" bf16 ", "bf16"),
        ("topk:.5", "topk:0.5"),
    ],
)
def test_a_name_has_one_short_form(given: str, name: str) -> None:
    assert get(given).name == name


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("int", "int"),
        ("int5", "int"),
        ("fp15", "fp16"),
        ("float16", "fp16"),
        ("top-k", "topk"),
        ("bf-16", "bf16"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        get(wrong)
    assert f"did you mean {nearest}" in caught.value.hint
    assert caught.value.exit_status == 2


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(ConfigError) as caught:
        get("zzz")
    assert all(name in caught.value.hint for name in NAMES)


@pytest.mark.parametrize("wrong", ["topk:", "topk:0", "topk:-0.1", "topk:1.5", "topk:nan", "topk:many", "int4:2"])
def test_a_wrong_argument_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        get(wrong)
    assert caught.value.hint


@pytest.mark.parametrize("wrong", ["thin:", "thin:0", "thin:0.1", "thin:9", "thin:nan", "thin:wide"])
def test_a_step_of_thin_has_bounds(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        get(wrong)
    assert "thin:1.25" in caught.value.hint


def test_auto_is_for_runs_and_thin_not_for_collectives() -> None:
    names.check("auto")
    assert (names.first_of("auto"), names.first_of("thin")) == ("int4", "thin")
    with pytest.raises(ConfigError, match="auto"):
        get("auto")
    with pytest.raises(ConfigError, match="thin") as caught:
        names.parse_collective("thin")
    assert "int4" in caught.value.hint
    assert names.parse_collective("topk:0.5") == ("topk", 0.5)


@pytest.mark.parametrize(
    ("up", "down"),
    [("int4", "int4"), ("none", "none"), ("topk:0.05", "int8"), ("thin", "thin:1.25"), ("thin:1.5", "thin:1.5")],
)
def test_the_codec_of_changes_follows_from_that_of_gradients(up: str, down: str) -> None:
    assert names.down_of(up) == down


def test_all_is_what_is_exported() -> None:
    for name in potluck.codec.__all__:
        assert getattr(potluck.codec, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_that"):
        _ = potluck.codec.nothing_like_that


def test_names_can_be_read_without_torch() -> None:
    program = "import sys, potluck.codec; assert potluck.codec.NAMES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0


def test_auto_is_auto_however_it_is_written() -> None:
    assert names.is_auto(" AUTO ")
    assert not names.is_auto("int4")
