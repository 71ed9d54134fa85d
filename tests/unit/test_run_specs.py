"""What a run is started with: the settings of a recipe or a script, and what may change when it is resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from potluck.env import Environment, runs_folder
from potluck.errors import ConfigError, RunFolderError, UserError
from potluck.report.view import QuietView
from potluck.spec.config import RunConfig
from potluck.train.context import ALONE, HOST, resume_option
from potluck.train.run_specs import (
    RunSpec,
    changed,
    on_this_machine,
    recipe_spec,
    resumed_recipe,
    script_spec,
)
from potluck.train.session import Session


def kept(spec: RunSpec) -> Path:
    """The folder of a run of these settings."""
    config = replace(spec, config=changed(spec.config, {"device": "cpu", "bind": "127.0.0.1", "port": 0}))
    with Session(config, Environment(), QuietView()) as opened:
        return opened.folder.path


def new(runs: Path, settings: dict[str, Any], given: dict[str, Any]) -> RunSpec:
    return recipe_spec("gpt", settings, given, runs=runs, again=resume_option)


def test_given_settings_may_be_text_and_are_checked() -> None:
    before = RunConfig(codec="int8", wait_for=2)
    assert changed(before, {"wait_for": "3", "log": ("wandb",)}) == RunConfig(
        codec="int8", wait_for=3, log=("wandb",)
    )
    with pytest.raises(ConfigError, match="threads"):
        changed(before, {"threads": "0"})
    with pytest.raises(ConfigError, match="wait_form"):
        changed(before, {"wait_form": 1})


def test_guests_are_not_told_where_the_data_is(tmp_path: Path) -> None:
    spec = new(tmp_path, {"depth": "1", "data": "mine.txt"}, {})
    assert spec.recipe is not None
    assert spec.source is not None
    assert (spec.recipe.config["data"], spec.source.config["data"]) == ("mine.txt", None)
    assert (spec.role, spec.guests, spec.recipe.config["depth"]) == (HOST, 0, 1)
    assert [on_this_machine(spec, guests).role for guests in (0, 2)] == [ALONE, HOST]


def test_a_resumed_recipe_keeps_its_settings_but_its_steps(tmp_path: Path) -> None:
    folder = kept(new(tmp_path, {"depth": 1, "steps": 10}, {"codec": "int8", "wait_for": 3}))

    def again(**settings: Any) -> RunSpec:
        given = {"checkpoint_every": "7"}
        return resumed_recipe(folder.name, settings, given, runs=tmp_path, again=resume_option)

    spec = again(steps=20)
    assert spec.recipe is not None
    assert spec.source is not None
    assert (spec.recipe.config["depth"], spec.recipe.config["steps"], spec.source.config["steps"]) == (1, 20, 20)
    assert (spec.config.codec, spec.config.wait_for, spec.config.checkpoint_every) == ("int8", 0, 7)
    assert spec.resume == folder
    with pytest.raises(UserError, match="--batch-tokens, --set cannot change in a resumed run"):
        again(steps=20, batch_tokens=9, set=("a=b",))


def test_a_resumed_script_keeps_the_settings_that_are_not_given(tmp_path: Path) -> None:
    def spec(given: dict[str, Any], resume: str | None = None) -> RunSpec:
        return script_spec("job.py", given, runs=tmp_path, resume=resume, again=resume_option)

    folder = kept(spec({"codec": "int8", "name": "desk", "wait_for": 2}))
    found = spec({"name": "tower"}, folder.name)
    assert (found.config.codec, found.config.name, found.config.wait_for) == ("int8", "tower", 0)
    assert found.resume == folder
    with pytest.raises(RunFolderError, match="is the run of a script") as caught:
        resumed_recipe(str(folder), {}, {}, runs=tmp_path, again=resume_option)
    assert f"potluck host SCRIPT --resume {folder}" in caught.value.hint


def test_the_folder_of_runs_is_the_given_one_else_the_variables() -> None:
    elsewhere = Environment(runs=Path("elsewhere"))
    assert runs_folder(Path("given"), elsewhere) == Path("given")
    assert runs_folder(None, elsewhere) == Path("elsewhere")
    assert runs_folder(None, Environment()) == Path("runs")
