"""`potluck join TOKEN`: connect to a host, run the script it sends and compute for it."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from potluck.cli._app import Settings
from potluck.cli._options import view_option
from potluck.errors import (
    LoopError,
    MissingModuleError,
    NetworkError,
    PotluckError,
    ScriptError,
    TokenError,
    UserError,
)

_NAME = re.compile(r"[A-Za-z0-9._/-]{0,80}")
"""A valid name of a module, package or file. Other names from a host are not repeated in a suggested command."""
RUN_FAILED = "failed"
"""The reason a host gives its guests when its training ended with an error."""


@click.command()
@click.argument("token", required=False)
@click.option("--token-file", type=click.Path(path_type=Path), help="Read the token from a file.")
@click.option(
    "--device", help="cpu, cuda, cuda:1, mps or paced:SECONDS_PER_SAMPLE (default: CUDA, else MPS, else CPU)."
)
@click.option("--threads", type=click.IntRange(1), help="Number of CPU threads (default: physical cores).")
@click.option("--name", help="Name of this machine in logs and tables (default: its host name).")
@click.option(
    "--micro-batch", type=click.IntRange(1), help="Samples computed at once (default: found by measuring)."
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    help="Run this local script instead of the one the host sends.",
)
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds to wait for the host to answer.",
)
@click.option(
    "--give-up",
    "give_up_s",
    type=click.FloatRange(0.0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Leave after the host has been unreachable for this long.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="Folder for flight records after a fault (default: the temporary folder).",
)
@click.option("--parent", type=int, hidden=True, help="End when this process is gone.")
@view_option
@click.pass_obj
def join(settings: Settings, /, token: str | None, token_file: Path | None, **flags: Any) -> int:
    """Join a run with this machine. TOKEN is the text that the host printed.

    The host's script runs on this machine: join only runs of people you trust. Without TOKEN, the token is read
    from --token-file, then from the variable POTLUCK_TOKEN, then asked for.

    \b
    Examples:
      potluck join potluck2-…
      potluck join --token-file token.txt --device cpu --threads 4
    """
    from potluck.fleet.life import leased
    from potluck.wire.token import decode

    # Before anything slow: whatever this process waits for, it must not outlive who started it.
    with leased(flags["parent"]):
        decoded = decode(_find_token(token, token_file, settings))
        return _serve(settings, decoded, flags)


def _find_token(token: str | None, token_file: Path | None, settings: Settings) -> str:
    if token:
        return token
    if token_file is not None:
        try:
            return token_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(
                f"cannot read a token from {token_file}: {error}",
                hint="the host's run folder has it in the file `token`; copy that, or type the token",
            ) from error
    if settings.environment.token:
        return settings.environment.token
    if sys.stdin.isatty():
        answer: str = click.prompt("token", hide_input=True)
        return answer
    raise TokenError("no token was given", hint="type the command that the host printed: potluck join TOKEN")


def _serve(settings: Settings, token: Any, flags: dict[str, Any]) -> int:
    """Connect, build the host's model and compute until the run is over; returns the exit status."""
    from potluck.cli._session import machine_name
    from potluck.device import pick
    from potluck.hub.link import GuestLink
    from potluck.report.guest_view import GuestView
    from potluck.sinks import guarded
    from potluck.spec.config import RunConfig
    from potluck.spec.messages import HelloMessage
    from potluck.train.events import EventLog
    from potluck.train.launch import GUEST, Launch, set_launch
    from potluck.train.telemetry import versions

    config = RunConfig(name=flags["name"], micro_batch=flags["micro_batch"])
    device = pick(
        flags["device"] or settings.environment.device,
        threads=flags["threads"] or settings.environment.threads,
    )
    name = machine_name(settings, config)
    hello = HelloMessage(name=name, device=device.label, platform=sys.platform, **versions())
    view = guarded(GuestView(flags["view"]), "the view")
    link = GuestLink(token, hello, give_up_s=flags["give_up_s"], recorder=_recorder(name, flags["runs"], view))
    link.waiting = view.waiting
    link.preparing = view.preparing
    link.missing = lambda seconds: view.missing(seconds, flags["give_up_s"])
    link.found = view.found
    welcome = link.connect(flags["wait_s"])
    view.joined(
        host=welcome.message.host,
        address=link.address,
        run=welcome.message.run,
        name=welcome.message.name,
        device=f"{device.label} ({device.reason})",
    )
    launch = Launch(
        role=GUEST,
        config=config,
        device=device,
        name=welcome.message.name,
        log=EventLog(None, view.event),
        link=link,
        welcome=welcome,
    )
    set_launch(launch)
    return _compute(launch, flags["script"], view)


def _recorder(name: str, runs: Path | None, view: Any) -> Any:
    """The flight recorder. A guest has no run folder, so the path is printed when a record is written."""
    from potluck.hub.recorder import Recorder
    from potluck.sinks import guarded

    if runs is None:  # all processes of this machine share the folder for temporary files
        name, runs = f"{name}-{os.getpid()}", Path(tempfile.gettempdir())
    return guarded(Recorder(name, runs, tell=view.recorded), "the flight recorder")


def _compute(launch: Any, script: Path | None, view: Any) -> int:
    """Run the host's script until the run is over, then leave in order; returns the exit status."""
    from potluck.train.launch import GuestDone, set_launch

    link = launch.link
    try:
        _run_work(launch, script, view)
        if not launch.began:
            raise LoopError("the host's script ended without training", hint="does it reach run.steps()?")
        launch.end_training("its script left the loop")
        view.ended("the script left its loop")
    except GuestDone as done:
        view.ended(f"the run is over: {done}")
        if str(done) == RUN_FAILED:
            click.echo("the run failed on its host; see the host's terminal for the reason", err=True)
            return 1
        link.recorder.discard()
    except KeyboardInterrupt:
        launch.end_training("stopped by the person there")
        view.ended("left the run")
        raise
    except SystemExit as left:
        if left.code not in (None, 0):
            _failed(launch, f"its script ended with status {left.code}")
        raise
    except Exception as error:
        if not isinstance(error, NetworkError):  # the link has recorded what happened to it
            _failed(launch, _why(error), records=not isinstance(error, UserError))
        raise
    finally:
        launch.end_training("its script left the loop")
        set_launch(None)
        link.close("left")
        link.recorder.write(now=True)
        view.close()
    return 0


def _why(error: Exception) -> str:
    """The failure as the host reports it: the script's own exception, not the ScriptError around it."""
    cause = error.__cause__ if isinstance(error, ScriptError) and error.__cause__ is not None else error
    words = " ".join(str(cause).split())
    if isinstance(cause, PotluckError):
        return f"its script failed: {words}"
    return f"its script failed with {type(cause).__name__}" + (f": {words}" if words else "")


def _failed(launch: Any, why: str, *, records: bool = False) -> None:
    """Tell the host, whose user may be able to fix it. `records`: a bug is possible, so write a flight record."""
    launch.failure = why[:200]
    if records:
        launch.link.recorder.fault(launch.failure)
    launch.end_training(launch.failure)
    launch.link.close(launch.failure, failed=True)


def _check_modules(script: str, imports: dict[str, str]) -> None:
    """Before the script runs: list all modules at once that it imports and this machine lacks."""
    from potluck.fleet.script import guest_hint, missing_here

    names = {module: where for module, where in imports.items() if all(map(_NAME.fullmatch, (module, where)))}
    missing = missing_here(names)
    if missing:
        raise MissingModuleError(
            f"this machine lacks what {script} imports: {', '.join(missing)}", hint=guest_hint(missing)
        )


def _run_work(launch: Any, local: Path | None, view: Any) -> None:
    from potluck.checked import build
    from potluck.cli._scripts import GUEST_HINT, HINT, IN_LOOP_HINT, running
    from potluck.fleet.script import read_script, received_script, run_file, run_received
    from potluck.train import recipes
    from potluck.train.recipes.job import train as train_recipe

    source = launch.welcome.message.source
    if source.recipe:
        recipe = recipes.get(source.recipe)
        view.runs(f"the recipe {recipe.name}")
        train_recipe(recipe, build(recipe.Config, source.config))
        return
    names, arguments = source.files, source.arguments
    if local is not None:
        script = read_script(local, (), arguments)
        view.runs(f"the local script {local} (sha256 {script.sha256[:16]}…)")
        with running(local.name, hint=lambda: IN_LOOP_HINT if launch.began else HINT, guest=True):
            run_file(local, arguments)
        return
    contents = [bytes(f) for f in launch.welcome.frames]
    script = received_script(names, contents, arguments, source.sha256)
    _check_modules(names[0], source.imports)
    view.runs(f"{names[0]} from the host (sha256 {script.sha256[:16]}…)")
    with running(names[0], hint=lambda: IN_LOOP_HINT if launch.began else GUEST_HINT, guest=True):
        run_received(script)
