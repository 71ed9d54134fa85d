"""`potluck host`: a run of a recipe or of a user's script that guests can join."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.cli._options import TrainFlags
from potluck.cli._runs import runs_folder
from potluck.cli._sharing import Sharing
from potluck.cli.train import recipe_spec, run_recipe
from potluck.errors import UserError


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
    settings.launched = flags["launched"]
    if what.endswith(".py") or "/" in what:
        run_script(settings, Path(what), arguments, send, flags)
        return
    if arguments:
        raise UserError("a recipe takes no arguments", hint="use settings instead, for example --set warmup=50")
    spec = recipe_spec(settings, what, flags, command="host")
    run_recipe(settings, spec, flags["view"], _sharing(flags))


def _sharing(flags: TrainFlags) -> Sharing:
    return Sharing(token_file=flags["token_file"], lan=flags["lan"], qr=flags["qr"])


def run_script(
    settings: Settings, path: Path, arguments: tuple[str, ...], send: tuple[Path, ...], flags: TrainFlags
) -> None:
    from potluck.cli import _session
    from potluck.fleet.running import running
    from potluck.fleet.script import imports_of, not_sent, read_script, run_file
    from potluck.train.context import HOST
    from potluck.train.ending import Interrupted
    from potluck.train.folder import find_run, open_folder
    from potluck.train.session import RunSpec

    script = read_script(path, send, arguments)
    imports = imports_of(script, path.resolve().parent)
    unused = options.given(flags, options.RECIPE_FLAGS)
    if unused or flags["more"]:
        names = ", ".join(f"--{n.replace('_', '-')}" for n in unused) or "--set"
        raise UserError(f"{names} works only with a recipe", hint="set these in your script instead")
    runs = runs_folder(settings, flags["runs"])
    resume = find_run(str(flags["resume"]), runs) if flags["resume"] is not None else None
    in_run, _ = options.read_config_file(flags["config_file"], None)
    before = open_folder(resume).read_manifest().settings_to_resume() if resume is not None else {}
    sends = [word for file in send for word in ("--send", str(file))]
    spec = RunSpec(
        role=HOST,
        config=options.run_config({**before, **in_run}, flags),
        what=path.name,
        source=script.source(imports),
        files=script.contents,
        resume=resume,
        runs=runs,
        again=_session.resumed_by("host", str(path), *sends, arguments=arguments),
    )
    if (files := not_sent(imports)) and flags["view"] != "quiet":
        more = " ".join(f"--send {file}" for file in files)
        _session.say(f"warning: {path.name} imports {', '.join(files)}, which guests will lack: add {more}")
    try:
        with _session.session(settings, spec, flags["view"], _sharing(flags)) as session, running(path.name):
            try:
                run_file(path, arguments)
            except SystemExit as left:
                # Asked for its help it has done what it should; else sys.exit() is an end like any other.
                if left.code not in (None, 0) or {"-h", "--help"} & set(arguments):
                    raise
            session.check_began()
    except Interrupted as stop:
        _session.say_resume(session, stop)
        raise
