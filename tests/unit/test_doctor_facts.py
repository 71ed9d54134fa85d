"""facts.json and findings: they round-trip, and a damaged file is an error that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from potluck.doctor import examine
from potluck.errors import UserError
from potluck.spec.facts import Case, from_json, to_json
from support.healthy import linux, mac, pair, unreached


@pytest.mark.parametrize("case", [Case(here=linux()), pair(mac(), linux()), unreached(None, {})])
def test_facts_round_trip(case: Case) -> None:
    assert from_json(to_json(case)) == case


def test_keys_of_a_newer_version_are_left_out() -> None:
    value = json.loads(to_json(pair()))
    value["here"]["a_new_fact"] = {"x": 1}
    value["between"]["reaches"][0]["more"] = 1
    assert from_json(json.dumps(value)) == pair()


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
        (change(["here"], None), "incomplete"),
        (change(["here"], []), "facts.here"),
        (change(["here", "name"], None), "incomplete"),
        (change(["here", "name"], 7), "facts.here.name"),
        (change(["here", "interfaces"], "eth0"), "facts.here.interfaces"),
        (change(["here", "interfaces", 1, "mtu"], "big"), "facts.here.interfaces[1].mtu"),
        (change(["here", "cpu", "usable"], True), "facts.here.cpu.usable"),
        (change(["here", "environment"], {"X": 1}), "facts.here.environment.X"),
    ],
)
def test_wrong_facts_are_an_error_that_names_the_place(wrong: Callable[[dict[str, Any]], None], words: str) -> None:
    content = json.loads(to_json(pair()))
    wrong(content)
    with pytest.raises(UserError) as caught:
        from_json(json.dumps(content))
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", "[" * 100_000])
def test_what_is_no_facts_file_is_an_error(text: str) -> None:
    with pytest.raises(UserError):
        from_json(text)


def test_a_diagnosis_is_json_for_programs() -> None:
    content = json.loads(examine(pair(linux(memory_free_bytes=10**8))).to_json())
    assert content["healthy"] is True
    (finding,) = content["findings"]
    assert finding["code"] == "little-memory"
    assert set(finding) == {"code", "severity", "machine", "what", "how", "breaks", "fix", "pains"}
    assert content["fine"][0].keys() == {"machine", "what", "details"}
