"""`potluck train`: trains a recipe with a host and guests as processes on this machine."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from potluck.checked import build
from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.cli._options import TrainFlags
from potluck.env import runs_folder

if TYPE_CHECKING:
    from potluck.train.run_specs import RunSpec


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
    from potluck.train.run_specs import on_this_machine

    spec = recipe_spec(settings, recipe, flags, command="train")
    default = spec.guests if spec.resume is not None else 1
    run_recipe(settings, on_this_machine(spec, default if guests is None else guests), flags)


def recipe_spec(settings: Settings, recipe: str, flags: TrainFlags, *, command: str) -> RunSpec:
    """A recipe's run, new or resumed."""
    from potluck.cli._session import resumed_by
    from potluck.train import run_specs

    of_recipe = options.given(flags, options.RECIPE_FLAGS)
    runs, again = runs_folder(flags["runs"], settings.environment), resumed_by(command)
    if flags["resume"] is not None:
        others = {"config": flags["config_file"], "set": flags["more"]}
        of_recipe |= {name: value for name, value in others.items() if value}
        run_settings = options.run_settings({}, flags)
        return run_specs.resumed_recipe(str(flags["resume"]), of_recipe, run_settings, runs=runs, again=again)
    in_run, in_recipe = options.read_config_file(flags["config_file"], recipe)
    of_recipe = {**in_recipe, **of_recipe, **options.pairs(flags["more"])}
    return run_specs.recipe_spec(recipe, of_recipe, options.run_settings(in_run, flags), runs=runs, again=again)


def run_recipe(settings: Settings, spec: RunSpec, flags: TrainFlags) -> None:
    from potluck.cli import _session
    from potluck.report.curve import write_loss_png
    from potluck.report.summary import losses, read_events
    from potluck.train import recipes
    from potluck.train.recipes.job import train as train_recipe

    assert spec.recipe is not None
    recipe = recipes.get(spec.recipe.name)
    config = build(recipe.Config, spec.recipe.config)
    with _session.session(settings, spec, flags) as session:
        model = train_recipe(recipe, config)
    folder, device = session.folder, session.context.device.torch_device
    steps, values = losses(read_events(folder.path))
    write_loss_png(folder.path, steps, values)
    if flags["view"] in ("json", "quiet"):
        return
    show_end(
        folder.path,
        steps,
        values,
        recipe.finish(model, config, device),
        recipe.validation(model, config, device),
        runs=runs_folder(None, settings.environment),
    )


def show_end(
    folder: Path, steps: list[int], values: list[float], words: str, validation: float | None, *, runs: Path
) -> None:
    """Print the loss curve, the summary, a sample of the model's output and the path of the run folder.

    `runs`: the folder in which `potluck report` looks for the run.
    """
    from potluck.report.curve import loss_curve_text
    from potluck.report.summary import read_events, summarize
    from potluck.report.summary_text import summary_text
    from potluck.report.text import columns_of, fitted, writes_utf8

    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    click.echo("")
    curve = loss_curve_text(steps, values, width - 1, 14, ascii_only=not writes_utf8(sys.stdout))
    if curve:
        click.echo(curve + "\n")
    click.echo(fitted(summary_text(summarize(read_events(folder)), columns_of(sys.stdout)), sys.stdout))
    if validation is not None:
        click.echo(f"\non held-out data: {validation:.4f}")
    click.echo(fitted(f"\n{words}\n", sys.stdout))  # a young model writes what no alphabet has
    here = runs / folder.name
    shortest = folder.name if here.is_dir() and here.samefile(folder) else folder
    click.echo(fitted(f"run folder: {folder}  (potluck report {shlex.quote(str(shortest))})", sys.stdout))
