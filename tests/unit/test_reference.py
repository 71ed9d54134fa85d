"""The hand-written tables of docs/reference/ name every setting there is, and no other."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import click
import pytest
from msgspec.structs import fields

from potluck.cli._app import app
from potluck.dist.config import PREFIX, Config
from potluck.spec.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
COMMANDS = dict(generate.commands(app, ("potluck",)))


def section(page: str, title: str) -> str:
    """A section of a page, with those below it."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
    assert level is not None, f"{page} has no section {title!r}"
    rest = text[level.end() :]
    following = re.search(rf"^#{{1,{len(level[1])}}} ", rest, re.M)
    return rest[: following.start()] if following else rest


def first_cells(text: str) -> set[str]:
    """The names in the first column of the tables, without those of the heads."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`-*([\w-]+)", cell)}


def options_of(command: click.Command) -> set[str]:
    shown = (p for p in command.params if isinstance(p, click.Option) and not p.hidden)
    return {name for option in shown for name in option.opts if name.startswith("--")}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_page_explains_every_option(name: str) -> None:
    verb = " ".join(name.split()[:2])
    words = section("cli.md", verb)
    if verb in ("potluck train", "potluck host"):
        words += section("cli.md", "Recipe options") + section("cli.md", "Run options")
    missing = options_of(COMMANDS[name]) - set(re.findall(r"--[a-z][\w-]*", words)) - {"--debug"}
    if verb in ("potluck join", "potluck up", "potluck sweep"):  # "as above"
        missing -= set(re.findall(r"--[a-z][\w-]*", section("cli.md", "Run options")))
    assert not missing


def test_the_command_line_page_names_no_option_that_is_gone() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (REFERENCE / "cli.md").read_text(encoding="utf-8")))
    shown = [p for c in COMMANDS.values() for p in c.params if isinstance(p, click.Option)]
    there = {name for option in shown for name in (*option.opts, *option.secondary_opts)}
    assert sorted(named - there) == [
        "--help",
        "--nproc-per-node",
        "--standalone",
        "--version",
    ]  # two are torchrun's


def names_of(config: type) -> Iterable[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config)]
    return [field.name for field in fields(config)]


def test_run_settings_are_complete() -> None:
    table = section("configuration.md", "Run settings")
    assert first_cells(table) == set(names_of(RunConfig))


def test_settings_of_the_backend_are_complete() -> None:
    table = section("dist.md", "Settings")
    rows = [line for line in table.splitlines() if line.startswith("| `") and PREFIX in line]
    assert [re.findall(r"`([\w-]+)`", row)[0] for row in rows] == list(names_of(Config))
    assert all(f"`{PREFIX}{name.upper()}`" in row for name, row in zip(names_of(Config), rows))


@pytest.mark.slow
def test_keywords_of_python_are_complete() -> None:
    """These import torch."""
    from potluck.hosting import start
    from potluck.train.run import Run

    def keywords(function: object) -> set[str]:
        given = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return {p.name for p in given if p.kind is p.KEYWORD_ONLY}

    assert first_cells(section("python.md", "`potluck.start`")) == keywords(start)
    assert first_cells(section("configuration.md", "Keywords of run.steps")) == keywords(Run.steps)
    for function in (start, Run.steps):
        explained = re.findall(r"^ {4,12}(\w+): ", function.__doc__ or "", re.M)
        assert keywords(function) <= set(explained), "an editor shows each keyword with what it means"
