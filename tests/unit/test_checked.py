"""Typed data made in several threads. What is said about wrong data: test_config.py and others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from potluck import checked
from potluck.checked import toml_table
from potluck.errors import ConfigError
from potluck.spec.config import RunConfig

SCRIPT = """
import sys, threading
import msgspec
from potluck import checked

looked, go_on = threading.Event(), threading.Event()

def slow():
    looked.set()
    go_on.wait(0.2)
    return int

class Inner(msgspec.Struct):
    a: "slow()"

class Kind(msgspec.Struct):
    b: int
    inner: Inner

uses = {
    "decode": lambda: checked.decode(b'{"b": 1, "inner": {"a": 1}}', Kind),
    "convert": lambda: checked.convert({"b": 1, "inner": {"a": 1}}, Kind),
}
first = threading.Thread(target=uses["convert"])
first.start()
looked.wait()
uses[sys.argv[1]]()
go_on.set()
first.join()
"""


@pytest.mark.parametrize("use", ["decode", "convert"])
def test_threads_that_use_a_class_for_the_first_time_at_once(use: str) -> None:
    """In a process of its own: msgspec 0.22 ends it with a segmentation fault if nobody takes turns."""
    words = [sys.executable, "-c", SCRIPT, use]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ({"checkpoint_every": 10**30}, "checkpoint_every must be a whole number, 0 or more, at most 2^62"),
        ({"checkpoint_every": -(10**30)}, "checkpoint_every must be a whole number, 0 or more"),
        ({"checkpoint_every": "often"}, "checkpoint_every must be a whole number, 0 or more"),
        ({"port": 10**30}, "port must be a whole number from 0 to 65535"),
        ({"name": 10**30}, "name must be text of at most 200 characters"),
    ],
    ids=str,
)
def test_a_huge_number_is_told_the_bound_that_it_breaks_and_no_other(setting: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked.build(RunConfig, setting)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "text",
    [f"a = {'[' * 5000}{']' * 5000}", f"{'.'.join(['a'] * 3000)} = 1", f"a = {'9' * 5000}"],
    ids=["lists", "tables", "digits"],
)
def test_a_toml_file_beyond_what_python_reads_is_the_users_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml is ") as failure:
        toml_table(text, "run.toml", example="seed = 1")
    assert failure.value.hint == "seed = 1"
