"""`potluck join TOKEN`: connect to a host, run the script it sends and compute for it."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from potluck.cli._app import Settings
from potluck.cli._options import duration, shared
from potluck.errors import RefusedError, TokenError
from potluck.units import seconds_text

if TYPE_CHECKING:
    from potluck.wire.token import Token

ANSWERS_S = 30.0
"""How long a host may take to answer, at least."""
LOOK_S = 0.2
SETTLES_S = 10.0
"""A host that refuses a token has written its own to the file by then."""
_MOST_TOKEN_BYTES = 4096


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
    from --token-file, then from the variable POTLUCK_TOKEN. Otherwise potluck lists the runs that it sees in this
    network (those of `potluck host --lan`) and asks for the code or the token.

    \b
    Examples:
      potluck join potluck3-…
      potluck join                            look in this network, and ask
      potluck join 12-maple-otter             the same without a question
      potluck join --token-file token.txt --device cpu --threads 4
      potluck join --token-file token.txt --wait 10m    the host may write the file later
    """
    from potluck.fleet.awake import awake
    from potluck.fleet.life import leased
    from potluck.wire.token import decode

    from_stdin, posix = not token and str(token_file) == "-", os.name == "posix"
    if from_stdin and not posix:
        token = _line_of_stdin()  # before `leased`, which reads stdin to its end on such systems
    # Before anything slow: whatever this process waits for, it must not outlive who started it.
    with leased(parent), awake():
        if from_stdin and posix:
            if not select.select([0], [], [], 0)[0]:
                # torch takes seconds, and the token may come only then. Every optimizer imports its compiler.
                import torch._dynamo  # noqa: F401

                import potluck.fleet.received  # noqa: F401

            token = _line_of_stdin()  # empty if the process that started this dies first
        began = time.monotonic()
        text = _find_token(token, token_file, settings, flags["wait_s"] or 0.0)
        # A run that was killed leaves its file behind; the next one replaces it.
        file = token_file if not token and flags["wait_s"] else None
        while True:
            try:
                left_s = _left(flags["wait_s"], time.monotonic() - began)
                return _serve(settings, decode(text), flags, left_s, partial(_look_again, file, text))
            except RefusedError as error:
                new = _replaced_within(file, text, SETTLES_S)
                if not new:
                    raise
                click.echo(error.what, err=True)
                text = new
            except _NewToken as new_token:
                text = new_token.text
            click.echo(f"{token_file} has a new token: joining that run", err=True)


class _NewToken(Exception):
    """The token file was replaced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def _look_again(path: Path | None, text: str) -> None:
    """Raises _NewToken if the file holds another token than this."""
    if new := _replaced_within(path, text, 0.0):
        raise _NewToken(new)


def _replaced_within(path: Path | None, text: str, seconds: float) -> str:
    """The token that has replaced this one in the file; empty if none has after these seconds."""
    deadline = time.monotonic() + seconds
    while path is not None:
        with suppress(OSError, UnicodeDecodeError):
            if (found := path.read_text(encoding="utf-8").strip()) and found != text:
                return found
        if time.monotonic() >= deadline:
            break
        time.sleep(LOOK_S)
    return ""


def _left(wait_s: float | None, waited_s: float) -> float | None:
    """How long the host may take to answer, after a wait for the token; None: the default."""
    return None if wait_s is None else max(wait_s - waited_s, min(wait_s, ANSWERS_S))


def _line_of_stdin() -> str:
    """The first line, without a byte of what follows it."""
    line = b""
    while len(line) < _MOST_TOKEN_BYTES and not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    if not line.strip():
        raise TokenError("standard input has no token", hint="its first line must be the token")
    return line.decode(errors="replace")


def _find_token(token: str | None, token_file: Path | None, settings: Settings, wait_s: float) -> str:
    from potluck.cli import _by_code
    from potluck.wire.code import parse_code

    if token:
        code = parse_code(token)
        return token if code is None else _by_code.token_by_code(code)
    if token_file is not None:
        return _read_token(token_file, wait_s)
    if settings.environment.token:
        return settings.environment.token
    if sys.stdin.isatty():
        return _by_code.asked()
    raise TokenError("no token was given", hint="type the command that the host printed: potluck join TOKEN")


def _tell_page(view: str) -> Callable[[str], None]:
    return lambda url: None if view == "quiet" else click.echo(f"See it in a browser: {url}", err=view == "json")


def _read_token(path: Path, wait_s: float) -> str:
    """The token in a file, which the host may write only later. The host's rename lets it appear whole."""
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            if text := path.read_text(encoding="utf-8").strip():
                return text
            found: Exception | str = "it is empty"
        except FileNotFoundError as error:
            found = error
        except (OSError, UnicodeDecodeError) as error:
            found, deadline = error, 0.0
        if time.monotonic() >= deadline:
            raise TokenError(
                f"cannot read a token from {path}: {found}",
                hint="the host writes it with --token-file, and into its run folder as `token`"
                + ("" if wait_s else "; to wait for the file, add --wait 10m"),
            )
        if not told:
            click.echo(f"waiting for {path} ({seconds_text(wait_s)} at most)", err=True)
            told = True
        time.sleep(min(LOOK_S, wait_s))


def _serve(
    settings: Settings, token: Token, flags: JoinFlags, wait_s: float | None, replaced: Callable[[], None]
) -> int:
    """Connect, build the host's model and compute until the run is over; returns the exit status.

    `replaced` is called while the host does not answer.
    """
    from potluck.device import pick
    from potluck.fleet.received import run_work
    from potluck.report.guest_view import GuestView
    from potluck.sinks import guarded
    from potluck.spec.config import RunConfig
    from potluck.train.guest_session import RUN_FAILED, compute, connect
    from potluck.train.session import machine_name

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
        name=machine_name(config, settings.environment),
        view=view,
        wait_s=wait_s,
        give_up_s=flags["give_up_s"],
        records=flags["runs"],
        before_again=replaced,
    )
    if compute(context, lambda: run_work(context, flags["script"], view.runs), view) == RUN_FAILED:
        click.echo("the run failed on its host; see the host's terminal for the reason", err=True)
        return 1
    return 0
