"""Typed data made in several threads. What is said about wrong data: test_config.py and others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from potluck.checked import toml_table
from potluck.errors import ConfigError

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
    "text",
    [f"a = {'[' * 5000}{']' * 5000}", f"{'.'.join(['a'] * 3000)} = 1", f"a = {'9' * 5000}"],
    ids=["lists", "tables", "digits"],
)
def test_a_toml_file_beyond_what_python_reads_is_the_users_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml is ") as failure:
        toml_table(text, "run.toml", example="seed = 1")
    assert failure.value.hint == "seed = 1"
