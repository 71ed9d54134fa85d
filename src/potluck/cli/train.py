"""`potluck train`: trains a recipe with a host and guests as processes on this machine."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click
import msgspec

from potluck.checked import build
from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.cli._options import TrainFlags
from potluck.cli._runs import runs_folder
from potluck.cli._sharing import Sharing
from potluck.errors import RunFolderError, UserError
from potluck.spec.config import RunConfig
from potluck.spec.manifest import RecipeEntry
from potluck.spec.messages import Source

if TYPE_CHECKING:
    from potluck.train.session import RunSpec


@click.command()
@click.argument("recipe", default="gpt")
@click.option(
    "--guests",
    type=click.IntRange(0, 16),
    default=None,
    help="Guest processes to start on this machine (default 1; 0: train without guests).",
)
@options.recipe_options
@options.run_options
@click.pass_obj
def train(settings: Settings, /, recipe: str, guests: int | None, **flags: Unpack[TrainFlags]) -> None:
    """Train a RECIPE (gpt or cnn) on this machine, with one host and one guest process.

    \b
    Examples:
      potluck train                        a byte-level GPT on Python's standard library; about 2 minutes
      potluck train --guests 0             the same without a guest
      potluck train --depth 6 --steps 500  a larger model, more steps
      potluck train --data mytexts/        train on your own text
      potluck train cnn                    a small CNN on handwritten digits
      potluck train --log tensorboard      see it with: tensorboard --logdir runs
      potluck train --resume runs/ID       resume a run
    """
    from potluck.train.context import ALONE, HOST

    spec = recipe_spec(settings, recipe, flags, command="train")
    guests = spec.guests if guests is None else guests
    spec = replace(spec, guests=guests, role=HOST if guests else ALONE)
    run_recipe(settings, spec, flags["view"])


def recipe_spec(settings: Settings, recipe: str, flags: TrainFlags, *, command: str) -> RunSpec:
    """A recipe's run, new or resumed."""
    from potluck.cli._session import resumed_by
    from potluck.train import recipes
    from potluck.train.context import HOST
    from potluck.train.session import RunSpec

    if flags["resume"] is not None:
        return resumed_spec(settings, flags, command)
    in_run, in_recipe = options.read_config_file(flags["config_file"], recipe)
    kind = recipes.get(recipe)
    settings_of_recipe = {
        **in_recipe,
        **options.given(flags, options.RECIPE_FLAGS),
        **options.pairs(flags["more"]),
    }
    config = build(kind.Config, settings_of_recipe)
    table = msgspec.to_builtins(config)
    return RunSpec(
        role=HOST,
        config=options.run_config(in_run, flags),
        what=recipe,
        recipe=RecipeEntry(name=recipe, config=table),
        source=Source(recipe=recipe, config={**table, "data": None}),
        guests=1 if command == "train" else 0,
        runs=runs_folder(settings, flags["runs"]),
        again=resumed_by(command),
    )


def resumed_spec(settings: Settings, flags: TrainFlags, command: str) -> RunSpec:
    """A run that is resumed: as its manifest says, but for what the flags change."""
    from potluck.cli._session import resumed_by
    from potluck.train.context import HOST
    from potluck.train.folder import find_run, open_folder
    from potluck.train.session import RunSpec

    fixed = [n for n in options.given(flags, options.RECIPE_FLAGS) if n != "steps"]
    fixed += [n for n in ("config_file", "more") if flags.get(n)]
    if fixed:
        names = ", ".join(
            "--" + {"config_file": "config", "more": "set"}.get(n, n.replace("_", "-")) for n in fixed
        )
        raise UserError(
            f"{names} cannot change in a resumed run", hint="only --steps can change; or start a new run"
        )
    folder = open_folder(find_run(str(flags["resume"]), runs_folder(settings, flags["runs"])))
    manifest = folder.read_manifest()
    recipe = manifest.recipe
    if recipe is None:
        raise RunFolderError(
            f"{folder.path} is the run of a script, not of a recipe",
            hint=f"potluck host SCRIPT --resume {shlex.quote(str(folder.path))}",
        )
    table = {**recipe.config, **options.given(flags, ["steps"])}
    run = {**manifest.settings_to_resume(), **options.given(flags, (*options.RUN_FLAGS, *options.HOST_FLAGS))}
    return RunSpec(
        role=HOST,
        config=build(RunConfig, run),
        what=manifest.what,
        recipe=RecipeEntry(name=recipe.name, config=table),
        source=Source(recipe=recipe.name, config={**table, "data": None}),
        resume=folder.path,
        guests=manifest.guests if command == "train" else 0,
        again=resumed_by(command),
    )


def run_recipe(settings: Settings, spec: RunSpec, view: str, sharing: Sharing | None = None) -> None:
    from potluck.cli import _session
    from potluck.report.curve import loss_curve_png
    from potluck.report.summary import losses, read_events
    from potluck.sinks import guarded
    from potluck.train import recipes
    from potluck.train.ending import Interrupted
    from potluck.train.recipes.job import train as train_recipe

    assert spec.recipe is not None
    recipe = recipes.get(spec.recipe.name)
    config = build(recipe.Config, spec.recipe.config)
    try:
        with _session.session(settings, spec, view, sharing) as session:
            model = train_recipe(recipe, config)
    except Interrupted as stop:
        _session.say_resume(session, stop)
        raise
    folder, device = session.folder, session.context.device.torch_device
    steps, values = losses(read_events(folder.path))
    if steps:
        guarded(loss_curve_png, "loss.png")(folder.path / "loss.png", steps, values, title=folder.id)
    if view in ("json", "quiet"):
        return
    show_end(
        folder.path,
        steps,
        values,
        recipe.finish(model, config, device),
        recipe.validation(model, config, device),
    )


def show_end(folder: Path, steps: list[int], values: list[float], words: str, validation: float | None) -> None:
    """Print the loss curve, the summary, a sample of the model's output and the path of the run folder."""
    from potluck.report.curve import loss_curve_text
    from potluck.report.summary import read_events, summarize
    from potluck.report.summary_text import summary_text
    from potluck.report.text import fitted, writes_utf8

    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    click.echo("")
    curve = loss_curve_text(steps, values, width - 1, 14, ascii_only=not writes_utf8(sys.stdout))
    if curve:
        click.echo(curve + "\n")
    click.echo(fitted(summary_text(summarize(read_events(folder))), sys.stdout))
    if validation is not None:
        click.echo(f"\non held-out data: {validation:.4f}")
    click.echo(fitted(f"\n{words}\n", sys.stdout))  # a young model writes what no alphabet has
    here = Path("runs") / folder.name
    shortest = folder.name if here.is_dir() and here.samefile(folder) else folder
    click.echo(fitted(f"run folder: {folder}  (potluck report {shlex.quote(str(shortest))})", sys.stdout))
