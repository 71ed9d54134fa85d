"""The POTLUCK_* variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck import env
from potluck.errors import ConfigError


def test_nothing_set_is_all_defaults() -> None:
    assert env.read({"HOME": "/home/me", "PATH": "/bin"}) == env.Environment()


def test_every_variable_is_read() -> None:
    given = {
        "POTLUCK_TOKEN": " potluck1-abc ",
        "POTLUCK_DEVICE": "cuda:1",
        "POTLUCK_THREADS": "8",
        "POTLUCK_RUNS": "/data/runs",
        "POTLUCK_DEBUG": "1",
        "POTLUCK_NAME": "the tower",
        "POTLUCK_TRACE": "/trace.jsonl",
        "POTLUCK_FAILPOINT": "checkpoint.renamed=kill",
    }
    assert set(given) == set(env.VARIABLES) - set(env.DIST_VARIABLES)
    assert env.read(given) == env.Environment(
        token="potluck1-abc",
        device="cuda:1",
        threads=8,
        runs=Path("/data/runs"),
        debug=True,
        name="the tower",
        trace=Path("/trace.jsonl"),
        failpoint="checkpoint.renamed=kill",
    )


def test_an_empty_variable_counts_as_not_set() -> None:
    assert env.read(dict.fromkeys(env.VARIABLES, "")) == env.Environment()


def test_the_real_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_NAME", "here")
    assert env.read().name == "here"


@pytest.mark.parametrize(
    ("name", "nearest"), [("POTLUCK_TOKN", "POTLUCK_TOKEN"), ("POTLUCK_THREAD", "POTLUCK_THREADS")]
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        env.read({name: "x"})
    assert nearest in caught.value.hint


def test_an_unknown_variable_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        env.read({"POTLUCK_XYZQQ": "x"})
    assert all(name in caught.value.hint for name in env.VARIABLES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POTLUCK_THREADS", "0"),
        ("POTLUCK_THREADS", "-1"),
        ("POTLUCK_THREADS", "many"),
        ("POTLUCK_THREADS", "1.5"),
        ("POTLUCK_THREADS", "9" * 5000),
        ("POTLUCK_DEBUG", "maybe"),
        ("POTLUCK_DEVICE", "cuda 1"),
        ("POTLUCK_NAME", "n" * 65),
        ("POTLUCK_NAME", "bad\x1bname"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        env.read({name: value})
    assert caught.value.hint


def test_runs_must_not_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runs"
    file.write_text("")
    with pytest.raises(ConfigError, match="POTLUCK_RUNS"):
        env.read({"POTLUCK_RUNS": str(file)})


@pytest.mark.parametrize("where", [".", "missing/trace.jsonl"])
def test_the_trace_must_be_a_file_in_a_folder_that_exists(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="POTLUCK_TRACE") as caught:
        env.read({"POTLUCK_TRACE": str(tmp_path / where)})
    assert caught.value.hint


def test_the_token_is_never_shown() -> None:
    secret = "potluck1-verysecret"
    assert secret not in repr(env.read({"POTLUCK_TOKEN": secret}))
    with pytest.raises(ConfigError) as caught:
        env.read({"POTLUCK_TOKEN": f"{secret} {secret}"})
    assert secret not in str(caught.value) + caught.value.hint
