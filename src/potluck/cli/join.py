"""`potluck join TOKEN`: connect to a host, run the script it sends and compute for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from potluck.cli._app import Settings
from potluck.cli._options import duration, shared
from potluck.errors import TokenError

if TYPE_CHECKING:
    from potluck.wire.token import Token


class JoinFlags(TypedDict):
    device: str | None
    threads: int | None
    name: str | None
    micro_batch: int | None
    script: Path | None
    wait_s: float | None
    give_up_s: float
    runs: Path | None
    web: str | None
    view: str


@click.command()
@click.argument("token", required=False)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Read the token from a file (-: the first line of standard input). With --wait, it may not exist yet.",
)
@shared("device", "threads", "name", "micro_batch")
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    help="Run this local script instead of the one the host sends.",
)
@click.option(
    "--wait",
    "wait_s",
    callback=duration,
    metavar="DURATION",
    help="How long to wait for the token file and for the host to answer, such as 10m (default: 30s for the host, "
    "and 3s if its port is closed: its run has ended).",
)
@click.option(
    "--give-up",
    "give_up_s",
    callback=duration,
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="Leave after the host has been unreachable for this long.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="Folder for flight records after a fault (default: the temporary folder).",
)
@click.option("--parent", type=int, hidden=True, help="End when this process is gone.")
@shared("web", "view")
@click.pass_obj
def join(
    settings: Settings,
    /,
    token: str | None,
    token_file: Path | None,
    parent: int | None,
    **flags: Unpack[JoinFlags],
) -> int:
    """Join a run with this machine. TOKEN is the text that the host printed, or its code for this network.

    The host's script runs on this machine: join only runs of people you trust. Without TOKEN, the token is read
    from --token-file, then from the variable POTLUCK_TOKEN. Otherwise potluck lists the runs that it finds in this
    network (those of `potluck host --lan`) and asks for the code or the token.

    \b
    Examples:
      potluck join potluck3-…
      potluck join                            look in this network, and ask
      potluck join 12-maple-otter             the same without asking
      potluck join --token-file token.txt --device cpu --threads 4
      potluck join --token-file token.txt --wait 10m    the host may write the file later
    """
    from potluck.fleet import joining
    from potluck.fleet.life import leased
    from potluck.train.awake import awake

    wait_s, from_stdin, posix = flags["wait_s"], not token and str(token_file) == "-", os.name == "posix"
    if from_stdin and not posix:
        token = joining.token_on_stdin()  # before `leased`, which reads stdin to its end on such systems
    # Before anything slow: whatever this process waits for, it must not outlive who started it.
    with leased(parent), awake():
        if from_stdin and posix:
            joining.import_until_stdin()
            token = joining.token_on_stdin()  # empty if the process that started this dies first
        began = time.monotonic()
        return joining.join_as_replaced(
            _find_token(token, token_file, settings, wait_s or 0.0),
            partial(_serve, settings, flags),
            file=token_file if not token and wait_s else None,
            wait_s=wait_s,
            began=began,
            tell=_tell,
        )


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _find_token(token: str | None, token_file: Path | None, settings: Settings, wait_s: float) -> str:
    from potluck.cli import _by_code
    from potluck.fleet.joining import token_in
    from potluck.wire.by_code import token_by_code
    from potluck.wire.code import parse_code

    if token:
        code = parse_code(token)
        return token if code is None else token_by_code(code, _tell)
    if token_file is not None:
        return token_in(token_file, wait_s, _tell)
    if settings.environment.token:
        return settings.environment.token
    if sys.stdin.isatty():
        return _by_code.asked()
    raise TokenError("no token was given", hint="type the command that the host printed: potluck join TOKEN")


def _tell_page(view: str) -> Callable[[str], None]:
    return lambda url: None if view == "quiet" else click.echo(f"See it in a browser: {url}", err=view == "json")


def _serve(
    settings: Settings, flags: JoinFlags, token: Token, wait_s: float | None, before_again: Callable[[], None]
) -> int:
    """Connect, build the host's model and compute until the run is over. Returns the exit status.

    `before_again` is called while the host does not answer.
    """
    from potluck.device import pick
    from potluck.env import machine_name
    from potluck.fleet.received import run_work
    from potluck.report.guest_view import GuestView
    from potluck.sinks import guarded
    from potluck.spec.config import RunConfig
    from potluck.train.guest_session import RUN_FAILED, compute, connect

    config = RunConfig(name=flags["name"], micro_batch=flags["micro_batch"])
    device = pick(
        flags["device"] or settings.environment.device,
        threads=flags["threads"] or settings.environment.threads,
    )
    shown: Any = GuestView(flags["view"])
    if flags["web"] is not None:
        from potluck.web.guest_page import GuestPage

        shown = GuestPage(shown, flags["web"], _tell_page(flags["view"]))
    view = guarded(shown, "the view")
    context = connect(
        token,
        config=config,
        device=device,
        name=machine_name(config.name, settings.environment),
        view=view,
        wait_s=wait_s,
        give_up_s=flags["give_up_s"],
        records=flags["runs"],
        before_again=before_again,
    )
    if compute(context, lambda: run_work(context, flags["script"], view.runs), view) == RUN_FAILED:
        click.echo("the run failed on its host; see the host's terminal for the reason", err=True)
        return 1
    return 0
