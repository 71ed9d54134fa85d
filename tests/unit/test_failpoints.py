"""Failpoints: free of cost when off, exactly what is armed when on, and no name without its place or the
reverse."""

from __future__ import annotations

import ast
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from potluck import failpoints
from potluck.errors import ConfigError
from potluck.failpoints import FILES, FROM_GUEST, FROM_HOST, NAMES, arm, armed, hit
from potluck.spec.messages import FromGuest, FromHost
from support.processes import Processes

SOURCE = Path(failpoints.__file__).parent


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    arm(None)


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Where a function of that name is called in the source."""
    return ((where, call) for called, where, call in all_calls() if called == name)


@functools.cache
def all_calls() -> list[tuple[str, str, ast.Call]]:
    """The last name of what is called, and where, in all files that call `hit` or `replace`."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # To parse all files would take 2 s. A call cannot be written without its name before a bracket.
        if path.name == "failpoints.py" or not re.search(r"\b(hit|replace)\s*\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                last = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found.append((last, f"{path.relative_to(SOURCE)}:{node.lineno}", node))
    return found


def literal(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant), ast.unparse(node)
    assert isinstance(node.value, str)
    return node.value


def hits() -> dict[str, list[str]]:
    """The first argument of every hit(), which must be spelled out, and where; those with a detail end in a dot."""
    found = defaultdict(list)
    for where, call in calls("hit"):
        detail = call.args[1:]
        name = literal(call.args[0])
        if detail and isinstance(detail[0], ast.Constant):
            found[f"{name}.{literal(detail[0])}"].append(where)
        else:
            found[name + "." * bool(detail)].append(where)
    return found


def test_every_name_has_its_place_in_the_source_and_every_place_its_name() -> None:
    found = hits()
    for name in NAMES:
        whole = found.get(name, [])
        by_detail = found.get(name.rpartition(".")[0] + ".", [])
        assert whole or by_detail, f"no hit({name!r}) in the source"
        if not by_detail:
            assert len(whole) == 1, f"{name} is hit in {whole}: which of them is meant?"
    for name, where in found.items():
        assert name in NAMES or any(full.startswith(name) for full in NAMES), f"{where}: {name} is not in NAMES"


def test_the_details_are_the_files_and_messages_that_exist() -> None:
    whats = [k.value for _, call in calls("replace") for k in call.keywords if k.arg == "what"]
    replaced = {literal(what) for what in whats if isinstance(what, ast.Constant)}  # not dataclasses.replace
    assert replaced == set(FILES)
    assert {kind.kind for kind in get_args(FromGuest)} - {"alive"} == set(FROM_GUEST)
    assert {kind.kind for kind in get_args(FromHost)} - {"alive", "unknown", "wait"} == set(FROM_HOST)


def test_each_says_in_a_line_what_it_is() -> None:
    for name, words in NAMES.items():
        assert re.fullmatch(r"[a-z]+(\.[a-z-]+){1,2}", name)
        assert 10 < len(words) < 100
        assert "\n" not in words


def test_an_armed_one_fires_once_at_its_count() -> None:
    with armed("checkpoint.renamed=raise@3"):
        for _ in range(2):
            hit("checkpoint.renamed")
            hit("checkpoint.published")
        with pytest.raises(OSError, match=r"checkpoint\.renamed"):
            hit("checkpoint.renamed")
        hit("checkpoint.renamed")
    hit("checkpoint.renamed")


def test_details_and_whole_groups() -> None:
    with armed("host.received.done=raise"):
        hit("host.received", "grad")
        with pytest.raises(OSError, match=r"host\.received\.done"):
            hit("host.received", "done")
    with armed("host.received=raise@2"):
        hit("host.received", "grad")
        hit("host.handled", "grad")
        with pytest.raises(OSError, match=r"host\.received\.taken"):
            hit("host.received", "taken")


def test_a_stall_lasts_as_long_as_it_says() -> None:
    with armed("events.after-line=stall:0.05"):
        began = time.monotonic()
        hit("events.after-line")
        assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("action", ["kill", "kill:0.05"])
@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_a_kill_is_a_kill(tmp_path: Path, action: str) -> None:
    code = "import time; from potluck.failpoints import hit; from potluck import failpoints, env\n"
    code += "failpoints.arm(env.read().failpoint); print('before', flush=True); hit('host.updated'); time.sleep(30)"
    with Processes(tmp_path) as processes:
        process = processes.python("-c", code, env={"POTLUCK_FAILPOINT": f"host.updated={action}"})
        assert process.wait(20) == -signal.SIGKILL
        assert process.stdout() == "before\n"


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'checkpoint\.rename'") as caught:
        arm("checkpoint.rename=kill")
    assert "checkpoint.renamed" in caught.value.hint
    with pytest.raises(ConfigError, match="''"):
        arm("=kill")


@pytest.mark.parametrize(
    "rest",
    ["", "=", "=explode", "=kill@0", "=kill@x", "=kill@1.5", "=stall", "=stall:", "=stall:-1", "=stall:x"],
)
def test_a_wrong_action_or_count_is_an_error(rest: str) -> None:
    with pytest.raises(ConfigError, match="POTLUCK_FAILPOINT") as caught:
        arm("host.updated" + rest)
    assert "stall:SECONDS" in caught.value.hint


@pytest.mark.parametrize(
    "rest", ["=raise:1", "=stall:1e3", "=stall:99999", "=kill:0.1@2@3", "=kill=kill", "=stall:nan"]
)
def test_other_mistakes_too(rest: str) -> None:
    with pytest.raises(ConfigError, match="POTLUCK_FAILPOINT"):
        arm("host.updated" + rest)


def test_the_command_line_says_so_when_it_is_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "potluck", "report", "nowhere"],
        env={"POTLUCK_FAILPOINT": "checkpoint.renamd=kill", "PYTHONPATH": str(SOURCE.parent), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "did you mean checkpoint.renamed" in done.stderr


def test_off_it_costs_next_to_nothing() -> None:
    """The best of many rounds, against another function's call: other work on the machine must not decide."""

    def nothing(name: str, detail: str = "") -> None:
        return None

    def best_s(function: object) -> float:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            for _ in range(2000):
                function("host.received", "grad")  # type: ignore[operator]
            times.append(time.perf_counter() - began)
        return min(times)

    assert best_s(hit) < 4 * best_s(nothing)
