"""What the command line adds to a run's life: its view, the ways to join it, and how to resume it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from potluck.cli._app import Settings
from potluck.cli._sharing import Sharing, shared
from potluck.fleet.awake import awake
from potluck.fleet.life import reader_watched
from potluck.fleet.local import LocalGuests
from potluck.loggers.writing import loggers
from potluck.report.view import make_view
from potluck.train.context import RANK
from potluck.train.ending import Interrupted
from potluck.train.launch import launched
from potluck.train.session import RunSpec, Session
from potluck.web.opening import open_page


@contextmanager
def session(settings: Settings, spec: RunSpec, view: Any, sharing: Sharing | None = None) -> Iterator[Session]:
    """Open a run for the script or recipe that is run inside; `view` is the mode that was asked for."""
    if sharing is not None:
        sharing.check()
    if settings.launched:
        if not sys.stdin.readline():
            raise KeyboardInterrupt  # the launcher had no use for this host: nothing has begun
        spec = replace(spec, again=lambda folder: settings.launched.replace("{run}", shlex.quote(str(folder))))
    listener = loggers(spec.config.log)
    opened = Session(
        spec, settings.environment, make_view(view), guests=LocalGuests, listener=listener, page=open_page
    )
    with opened, launched(opened.context):
        if opened.context.role == RANK:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                yield opened
            return
        joining: AbstractContextManager[None] = nullcontext()
        if opened.token is not None and not spec.guests:
            joining = shared(opened, sharing or Sharing(), view, tell=view != "quiet" and not settings.launched)
        if opened.page is not None and view != "quiet":
            click.echo(f"See it in a browser: {opened.page.url}\n", err=view == "json")

        def on_gone() -> None:
            # Ctrl-C ends the other programs of a pipe too: then this is no news.
            if not opened.context.stop_requested():
                opened.context.request_stop()
                say("nobody reads the output any more (a closed pipe): stopping, as with Ctrl-C")

        with awake(), joining, reader_watched(on_gone) if view != "quiet" else nullcontext():
            yield opened


def resumed_by(*words: str, arguments: Sequence[str] = ()) -> Callable[[Path], str]:
    """The command that resumes the run in a folder. `words` follow `potluck`, `arguments` are the script's."""
    end = ["--", *arguments] if arguments else []
    return lambda folder: shlex.join(["potluck", *words, "--resume", str(folder), *end])


def say_resume(opened: Session, stop: Interrupted) -> None:
    """Where it was saved and how to resume; nothing where the run ended before there was anything to resume."""
    if opened.folder.path.exists():
        say(opened.stopped_line())
        stop.told = True


def say(line: str) -> None:
    with suppress(OSError):  # stderr may go where stdout went
        print(line, file=sys.stderr, flush=True)
