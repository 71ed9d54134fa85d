"""Opens a run, for a command or from Python: gives its session the view, the loggers, the page and local guests.

Owns the sentences that invite guests.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from potluck.env import Environment
from potluck.fleet.life import reader_watched
from potluck.fleet.local import LocalGuests
from potluck.loggers.writing import loggers
from potluck.report.view import Mode, in_notebook, make_view
from potluck.sinks import say
from potluck.train.run_specs import RunSpec
from potluck.train.session import OpenPage, Session


def session_of(spec: RunSpec, environment: Environment, view: Mode) -> Session:
    """The session of a run, which its `__enter__` opens.

    The run stops as with Ctrl-C if the reader of the output is gone. A notebook's output goes elsewhere.
    """
    page: OpenPage | None = None
    if spec.config.web is not None:
        from potluck.web.opening import open_page as page  # takes 80 ms to import
    return Session(
        spec,
        environment,
        make_view(view),
        guests=LocalGuests,
        listener=loggers(spec.config.log),
        page=page,
        show_code=say if view in ("json", "quiet") else None,
        reader=None if view == "quiet" or in_notebook() else reader_watched,
    )


def launched_by(command: str, spec: RunSpec) -> RunSpec:
    """The run of a host that a launcher has started. `command` resumes it, with {run} for its folder.

    Returns when a line comes on stdin: the launcher starts this process before it knows whether a machine answers.
    """
    if not sys.stdin.readline():
        raise KeyboardInterrupt  # the launcher had no use for this host: nothing has begun
    return replace(spec, again=lambda folder: command.replace("{run}", shlex.quote(str(folder))))


def tell_page(url: str, view: Mode) -> None:
    _tell(f"See it in a browser: {url}", view)


def tell_join_line(token: str, file: Path | None, view: Mode) -> None:
    """Print the command to type on other machines. With a file, the token stays out of a batch system's log."""
    way = token if file is None else shlex.join(["--token-file", str(file)])
    _tell(f"On each machine that should help, type:\n\n  potluck join {way}", view)


def tell_code(code: str, view: Mode) -> None:
    _tell(f"or, in this network, type `potluck join` there and then this code:\n\n  {code}", view)


def _tell(text: str, view: Mode) -> None:
    """Print to stdout. Beside a view of JSON, which programs read there, print to stderr."""
    print(f"{text}\n", file=sys.stderr if view == "json" else sys.stdout, flush=True)
