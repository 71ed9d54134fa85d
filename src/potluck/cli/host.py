"""`potluck host`: a run of a recipe or of a user's script that guests can join."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

import click

from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.cli._options import TrainFlags
from potluck.cli.train import recipe_spec, run_recipe
from potluck.env import runs_folder
from potluck.errors import UserError
from potluck.sinks import say


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("what", default="gpt")
@click.argument("arguments", nargs=-1)
@click.option(
    "--send",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also send this file to guests, such as a module that the script imports. May be repeated.",
)
@options.recipe_options
@options.run_options
@options.host_options
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the token to this file before the first step, and remove it at the end.",
)
@click.option("--lan", is_flag=True, help="Let machines in this network find the run, and join it by a short code.")
@click.option("--qr", is_flag=True, help="Also print the line for guests as a QR code.")
@click.option("--launched", default="", hidden=True, help="Started by this command, `potluck up …`.")
@click.pass_obj
def host(
    settings: Settings,
    /,
    what: str,
    arguments: tuple[str, ...],
    send: tuple[Path, ...],
    **flags: Unpack[TrainFlags],
) -> None:
    """Start a run that other machines can join, and print the command to type on them.

    WHAT is a recipe (gpt or cnn) or your own script. ARGUMENTS after -- are passed to the script.

    \b
    Examples:
      potluck host                          train the recipe gpt
      potluck host my_train.py              train with your own loop (see the README)
      potluck host my_train.py --send model.py -- --epochs 3
      potluck host --wait-for 2             start as soon as two guests are ready
      potluck host --log tensorboard        see it with: tensorboard --logdir runs
      potluck host --lan                    guests in this network type a short code
      potluck host --resume runs/ID         resume; the same token still works
      potluck host --token-file FILE        for a batch system: guests join with the same option

    \b
    Several GPUs in this machine, one process each:
      torchrun --standalone --nproc-per-node 2 -m potluck host my_train.py
    """
    from potluck.fleet.script import check_send, is_script

    check_send(what, send)
    if is_script(what):
        run_script(settings, Path(what), arguments, send, flags)
        return
    if arguments:
        raise UserError("a recipe takes no arguments", hint="use settings instead, for example --set warmup=50")
    spec = recipe_spec(settings, what, flags, command="host")
    run_recipe(settings, replace(spec, guests=0), flags)


def run_script(
    settings: Settings, path: Path, arguments: tuple[str, ...], send: tuple[Path, ...], flags: TrainFlags
) -> None:
    from potluck.cli import _session
    from potluck.fleet.script import described, read_script
    from potluck.fleet.script_errors import host_script
    from potluck.train.run_specs import script_spec

    script = read_script(path, send, arguments)
    source, lacking = described(script, path.resolve().parent)
    unused = options.given(flags, options.RECIPE_FLAGS)
    if unused or flags["more"]:
        names = ", ".join(f"--{n.replace('_', '-')}" for n in unused) or "--set"
        raise UserError(f"{names} works only with a recipe", hint="set these in your script instead")
    in_run, _ = options.read_config_file(flags["config_file"], None)
    sends = [word for file in send for word in ("--send", str(file))]
    spec = script_spec(
        path.name,
        options.run_settings(in_run, flags),
        runs=runs_folder(flags["runs"], settings.environment),
        resume=str(flags["resume"]) if flags["resume"] is not None else None,
        again=_session.resumed_by("host", str(path), *sends, arguments=arguments),
    )
    if lacking and flags["view"] != "quiet":
        more = " ".join(f"--send {file}" for file in lacking)
        say(f"warning: {path.name} imports {', '.join(lacking)}, which guests will lack: add {more}")
    spec = replace(spec, source=source, files=script.contents)
    with _session.session(settings, spec, flags) as session:
        host_script(session, path, arguments)
