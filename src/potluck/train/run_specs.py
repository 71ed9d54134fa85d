"""What a run is started with: a recipe or a script, new or resumed, with all its settings resolved."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs, to_builtins

from potluck.checked import build
from potluck.codec import names as codecs
from potluck.errors import RunFolderError, UserError
from potluck.spec.config import RunConfig
from potluck.spec.manifest import RecipeEntry
from potluck.spec.messages import Source
from potluck.train import recipes
from potluck.train.context import ALONE, HOST, resume_option
from potluck.train.folder import find_run, open_folder
from potluck.train.handing_out import Sharing
from potluck.wire.keys import HostKeys

CAN_CHANGE = ("steps",)
"""The settings of a recipe that can change in a resumed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run about to start, resolved."""

    role: str
    config: RunConfig
    what: str
    """The recipe's or the script's name."""
    recipe: RecipeEntry | None = None
    """The recipe's settings; None for a script."""
    source: Source | None = None
    """The code that guests run."""
    files: tuple[bytes, ...] = ()
    """The contents of the files in `source`."""
    runs: Path = Path("runs")
    """Folder in which a new run's folder is made."""
    resume: Path | None = None
    """The folder of the run to resume."""
    guests: int = 0
    """Guests to start on this machine. With any, the port is open to this machine only."""
    keys: HostKeys | None = None
    """Keys of a new run that shares the token of an earlier one. If not given, new keys are made."""
    port: int = 0
    """The port of that earlier run, used if `config` has none."""
    sharing: Sharing = field(default_factory=Sharing)
    """The requested ways to hand out the token."""
    in_script: bool = False
    """The script itself opens the run. Signals are then handled only inside `Session.signals()`, and a stop is a
    KeyboardInterrupt, with which Python ends with the status of Ctrl-C."""
    again: Callable[[Path], str] = resume_option
    """The command that resumes the run in a folder, for messages and errors."""

    def __post_init__(self) -> None:
        self.sharing.check()
        codecs.check(self.config.codec)
        if self.config.codec_down is not None:
            codecs.parse(self.config.codec_down)


def recipe_spec(
    name: str,
    settings: Mapping[str, object],
    given: Mapping[str, object],
    *,
    runs: Path,
    again: Callable[[Path], str],
) -> RunSpec:
    """A new run of a recipe, with guests that join. `settings` are the recipe's, `given` those of the run."""
    kind = recipes.get(name)
    recipe = RecipeEntry(name=name, config=to_builtins(build(kind.Config, settings)))
    return RunSpec(
        role=HOST,
        config=changed(RunConfig(), given),
        what=name,
        recipe=recipe,
        source=_source(recipe),
        runs=runs,
        again=again,
    )


def resumed_recipe(
    run: str,
    settings: Mapping[str, object],
    given: Mapping[str, object],
    *,
    runs: Path,
    again: Callable[[Path], str],
) -> RunSpec:
    """A resumed run of a recipe, found by its folder or its id, with as many guests on this machine as before."""
    if fixed := [f"--{name.replace('_', '-')}" for name in settings if name not in CAN_CHANGE]:
        raise UserError(
            f"{', '.join(fixed)} cannot change in a resumed run", hint="only --steps can change; or start a new run"
        )
    folder = open_folder(find_run(run, runs))
    manifest = folder.read_manifest()
    if manifest.recipe is None:
        raise RunFolderError(
            f"{folder.path} is the run of a script, not of a recipe",
            hint=f"potluck host SCRIPT --resume {shlex.quote(str(folder.path))}",
        )
    recipe = structs.replace(manifest.recipe, config={**manifest.recipe.config, **settings})
    return RunSpec(
        role=HOST,
        config=changed(manifest.config_to_resume(), given),
        what=manifest.what,
        recipe=recipe,
        source=_source(recipe),
        resume=folder.path,
        guests=manifest.guests,
        again=again,
    )


def on_this_machine(spec: RunSpec, guests: int) -> RunSpec:
    """The same run with this many guests on this machine and no others."""
    return replace(spec, guests=guests, role=HOST if guests else ALONE)


def script_spec(
    what: str,
    given: Mapping[str, object],
    *,
    role: str = HOST,
    runs: Path,
    resume: str | None,
    guests: int = 0,
    again: Callable[[Path], str],
) -> RunSpec:
    """The run of a script, new or resumed, still without the script's code.

    A resumed run is found by its folder or its id. It keeps its settings except those in `given`.
    """
    before, folder = RunConfig(), None
    if resume is not None:
        folder = find_run(resume, runs)
        before = open_folder(folder).read_manifest().config_to_resume()
    return RunSpec(
        role=role,
        config=changed(before, given),
        what=what,
        runs=runs,
        resume=folder,
        guests=guests,
        again=again,
    )


def changed(config: RunConfig, given: Mapping[str, object]) -> RunConfig:
    """The config with these settings, which are checked and may be text, as flags are."""
    checked = build(RunConfig, given)
    return structs.replace(config, **{name: getattr(checked, name) for name in given})


def _source(recipe: RecipeEntry) -> Source:
    return Source(recipe=recipe.name, config={**recipe.config, "data": None})
