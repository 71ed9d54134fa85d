"""Opens a run for a command, and prints how to join it, how to see it and how to resume it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from potluck import run_session
from potluck.cli._app import Settings
from potluck.cli._options import TrainFlags
from potluck.cli._qr import check_qr, qr_code
from potluck.sinks import say
from potluck.train.ending import Interrupted
from potluck.train.handing_out import Sharing
from potluck.train.launch import launched
from potluck.train.run_specs import RunSpec
from potluck.train.session import Session


@contextmanager
def session(settings: Settings, spec: RunSpec, flags: TrainFlags) -> Iterator[Session]:
    """Open a run for the script or recipe that is run inside."""
    spec = replace(spec, sharing=Sharing(token_file=flags.get("token_file"), lan=flags.get("lan", False)))
    if flags.get("qr"):
        check_qr()
    if flags.get("launched"):
        spec = run_session.launched_by(flags["launched"], spec)
    opened = run_session.session_of(spec, settings.environment, flags["view"])
    try:
        with opened, launched(opened.context):
            _tell(opened, flags)
            yield opened
    except Interrupted as stop:
        if line := opened.stopped_line():
            say(line)
            stop.told = True
        raise


def _tell(opened: Session, flags: TrainFlags) -> None:
    view = flags["view"]
    if opened.context.page_url is not None and view != "quiet":
        run_session.tell_page(opened.context.page_url, view)
    if opened.token is None or opened.spec.guests:
        return
    # A launcher reads the token from the run folder.
    if view != "quiet" and not flags.get("launched"):
        run_session.tell_join_line(opened.token, opened.spec.sharing.token_file, view)
        if flags.get("qr"):
            stream = sys.stderr if view == "json" else sys.stdout
            click.echo(qr_code(f"potluck join {opened.token}", stream), file=stream)
    if opened.code is not None:
        run_session.tell_code(opened.code, view)


def resumed_by(*words: str, arguments: Sequence[str] = ()) -> Callable[[Path], str]:
    """The command that resumes the run in a folder. `words` follow `potluck`, `arguments` are the script's."""
    end = ["--", *arguments] if arguments else []
    return lambda folder: shlex.join(["potluck", *words, "--resume", str(folder), *end])
