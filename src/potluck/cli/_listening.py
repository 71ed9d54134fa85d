"""`--listen` of `potluck doctor` and `potluck probe`: the output while another machine may connect."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import click

from potluck.fleet.life import leased
from potluck.probe.listening import Listening
from potluck.report.text import clean


def serve(
    listening: Listening, verb: str, turn: Callable[[float], None], for_s: float, *, token_on_stderr: bool
) -> None:
    """Print the command for the other machine, then answer it until `for_s` or Ctrl-C ends that."""
    click.echo("\nOn the other machine, type:\n", err=token_on_stderr)
    click.echo(f"  potluck {verb} {listening.token}\n", err=token_on_stderr)
    click.echo(f"listening at {listening.bind} port {listening.socket.port}; Ctrl-C ends it", err=True)
    sys.stdout.flush()
    with leased(), contextlib.suppress(KeyboardInterrupt):
        listening.serve(turn, for_s)


def reports_peer(words: str) -> Callable[[str, str], None]:
    """A callback that reports a peer on stderr."""
    return lambda name, address: click.echo(f"{clean(name)} ({address}) {words}", err=True)
