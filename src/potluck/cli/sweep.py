"""`potluck sweep`: many trials of a script on all machines of a cluster, idle machines helping the last ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import click

from potluck import checked
from potluck.cli._app import Settings
from potluck.env import runs_folder


class SweepFlags(TypedDict):
    """The options of `potluck sweep`."""

    param: tuple[str, ...]
    trials: int | None
    engine: Literal["tune", "dask"]
    address: str | None
    metric: str
    mode: Literal["min", "max"]
    seed: int
    json_option: str | None
    send: tuple[Path, ...]
    checkpoint_every: int
    storage: Path | None
    runs: Path | None
    share: bool
    plot: Path | None
    as_json: bool


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option("--param", multiple=True, metavar="NAME=A,B", help="Values to try. May be repeated.")
@click.option("--trials", type=int, metavar="N", help="Number of trials (default: every combination once).")
@click.option(
    "--engine",
    type=click.Choice(("tune", "dask")),
    default="tune",
    show_default=True,
    help="Schedules the trials: Ray Tune or Dask.",
)
@click.option(
    "--address", help="Address of the cluster (default: the one this machine belongs to, else a local one)."
)
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    help="Value that ranks the trials: loss, or a name given to run.log().",
)
@click.option(
    "--mode",
    type=click.Choice(("min", "max")),
    default="min",
    show_default=True,
    help="Whether the smallest or the largest value is best.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Random seed for choosing trials, if not all combinations are tried.",
)
@click.option("--json-option", metavar="NAME", help="Pass the parameters as one JSON object: --NAME '{...}'.")
@click.option(
    "--send", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="As for `potluck host`."
)
@click.option(
    "--checkpoint-every",
    default=50,
    show_default=True,
    metavar="N",
    help="Save a checkpoint of each trial every N steps.",
)
@click.option(
    "--storage",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for checkpoints that all machines reach (default: in --runs).",
)
@click.option("--runs", type=click.Path(path_type=Path), help="Folder for the sweep's folder (default: runs).")
@click.option("--share/--no-share", default=True, help="Whether idle machines help running trials (default: yes).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the result to this PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_obj
def sweep(settings: Settings, /, script: Path, arguments: tuple[str, ...], **flags: Unpack[SweepFlags]) -> None:
    """Run a script with many parameters, one trial per machine, on a Ray or Dask cluster.

    When fewer trials are left than machines, idle machines join the running trials as guests. A trial whose machine
    is lost resumes elsewhere from its checkpoint. ARGUMENTS after -- are passed to every trial.

    \b
    Examples:
      potluck sweep train.py --param lr=1e-4,3e-4,1e-3
      potluck sweep train.py --param lr=1e-4,3e-4 --param width=64,128 --trials 12
      potluck sweep train.py --param lr=1e-4,3e-4 --metric val_loss -- --steps 500
      potluck sweep train.py --param lr=1e-4,3e-4 --engine dask --address tcp://desk:8786
      potluck sweep train.py --param lr=1e-4,3e-4 --plot sweep.png --json
    """
    from potluck.fleet.script import read_script
    from potluck.report import plot_style
    from potluck.report.screen import show
    from potluck.sweep import result_table, spec, trial_runs

    parameters = spec.parse_parameters(flags["param"])
    found = read_script(script, flags["send"], arguments)
    if flags["json_option"] is None:
        spec.check_options(found, list(parameters), _tell)
    trials = spec.trials_of(parameters, flags["trials"], flags["seed"])
    if flags["plot"] is not None:
        plot_style.check_file(flags["plot"])
    trial_runs.need_engine(flags["engine"])
    name = f"{time.strftime('sweep-%Y%m%d-%H%M%S')}-{script.stem}"
    folder = trial_runs.new_folder(runs_folder(flags["runs"], settings.environment) / name)
    settings_of_sweep = trial_runs.SweepSettings(
        script=found,
        trials=trials,
        folder=folder.absolute(),
        storage=trial_runs.own_storage(flags["storage"], folder.absolute()),
        address=flags["address"],
        json_option=flags["json_option"],
        checkpoint_every=flags["checkpoint_every"],
        share=flags["share"],
        tell=_tell,
        engine=flags["engine"],
        metric=flags["metric"],
        mode=flags["mode"],
    )
    record = trial_runs.run_sweep(settings_of_sweep)
    results = record.trials
    if flags["plot"] is not None:
        result_table.plot(flags["plot"], results, flags["metric"], f"{script.name}: {len(results)} trials")
    if flags["as_json"]:
        click.echo(checked.to_json(record, indent=2))
    else:
        show(result_table.table(results, flags["metric"], flags["mode"]), sys.stdout)
        click.echo(f"\n{folder / 'sweep.json'}")


def _tell(line: str) -> None:
    click.echo(line, err=True)
