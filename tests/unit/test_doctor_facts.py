"""facts.json and findings: they round-trip, and a damaged file is an error that says what is wrong."""

from __future__ import annotations

import json
import random
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from potluck.checked import read_json, to_json
from potluck.cli._doctor_view import lines_of
from potluck.doctor import examine
from potluck.doctor.facts.collecting import VARIABLES
from potluck.errors import UserError
from potluck.spec.facts import FORMAT, Case, case_of
from support.healthy import linux, mac, pair, unreached


@pytest.mark.parametrize("case", [Case(here=linux()), pair(mac(), linux()), unreached(None, {})])
def test_facts_round_trip(case: Case) -> None:
    assert case_of(json.loads(to_json(case))) == case


def test_keys_of_a_newer_version_are_left_out() -> None:
    value = json.loads(to_json(pair()))
    value["here"]["a_new_fact"] = {"x": 1}
    value["between"]["reaches"][0]["more"] = 1
    assert case_of(value) == pair()


def change(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        *before, last = path
        target: Any = content
        for key in before:
            target = target[key]
        if value is None:
            del target[last]
        else:
            target[last] = value

    return apply


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (change(["format"], 2), "format 2"),
        (change(["here"], None), "facts: here is missing"),
        (change(["here"], []), "facts: here is []"),
        (change(["here", "name"], None), "facts: here: name is missing"),
        (change(["here", "name"], 7), "facts: here: name is 7"),
        (change(["here", "interfaces"], "eth0"), "facts: here: interfaces is 'eth0'"),
        (change(["here", "interfaces", 1, "mtu"], "big"), "facts: here: interfaces 'eth0': mtu is 'big'"),
        (change(["here", "cpu", "usable"], True), "facts: here: cpu: usable is True"),
        (change(["here", "environment"], {"X": 1}), "facts: here: environment is {'X': 1}"),
    ],
)
def test_wrong_facts_are_an_error_that_names_the_place(wrong: Callable[[dict[str, Any]], None], words: str) -> None:
    content = json.loads(to_json(pair()))
    wrong(content)
    with pytest.raises(UserError) as caught:
        case_of(content)
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", "[" * 100_000])
def test_what_is_no_facts_file_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text)
    with pytest.raises(UserError):
        case_of(read_json(file, what="a facts file", hint="make one"))


WORDS = (
    "",
    "a",
    "eth0",
    "lo",
    "linux",
    "darwin",
    "nvidia",
    "connected",
    "refused",
    "timeout",
    "no route",
    "a token",
)
WORDS += (
    "127.0.0.1/8",
    "10.0.0.5/24",
    "::1",
    "10.0.0.5",
    "^lo",
    "--port",
    "ethernet",
    "wifi",
    "vpn",
    "container",
    "8",
)
WORDS += ("x/y", "sh (process 7)", "\x1b[2J")


def anything(hint: Any, dice: random.Random) -> Any:
    """Some value of this type, most of them senseless together."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if dice.random() < 0.3 else anything(arguments[0], dice)
    if origin is tuple:
        return tuple(anything(arguments[0], dice) for _ in range(dice.randrange(3)))
    if origin is dict:
        return {dice.choice(VARIABLES): dice.choice(WORDS) for _ in range(dice.randrange(4))}
    if isinstance(hint, type) and issubclass(hint, Struct):
        hints = typing.get_type_hints(hint)
        return typing.cast(Any, hint)(**{name: anything(hints[name], dice) for name in hints})
    choices = {str: WORDS, int: (0, 1, 7171, 10**12), float: (0.0, -1.5, 3.0, 1e12), bool: (True, False)}
    return dice.choice(typing.cast(Any, choices)[hint])


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_any_facts_round_trip_and_lead_to_a_diagnosis(seed: int) -> None:
    """Facts come from other machines: whatever they hold, there is an answer and no exception."""
    for number in range(seed, seed + 50):
        case = replace(anything(Case, random.Random(number)), format=FORMAT)
        assert case_of(json.loads(to_json(case))) == case
        diagnosis = examine(case)
        assert json.loads(to_json(diagnosis))["healthy"] == diagnosis.healthy
        shown = "".join(line.plain for line in lines_of(case, diagnosis, 80, None))
        assert "\x1b" not in shown  # another machine's words must not steer this terminal


def test_a_diagnosis_is_json_for_programs() -> None:
    content = json.loads(to_json(examine(pair(linux(memory_free_bytes=10**8)))))
    assert content["healthy"] is True
    (finding,) = content["findings"]
    assert finding["code"] == "little-memory"
    assert set(finding) == {"code", "severity", "machine", "what", "how", "breaks", "fix", "pains", "potluck"}
    assert content["fine"][0].keys() == {"machine", "what", "details"}
