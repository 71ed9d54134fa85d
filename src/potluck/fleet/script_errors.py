"""Runs a user's script and shows its exceptions as Python does, without Potluck's frames."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath

from potluck.errors import PotluckError, ScriptError
from potluck.fleet.life import reader_is_gone
from potluck.fleet.script import guest_hint, run_file
from potluck.train.ending import Interrupted
from potluck.train.session import Session

PLAIN_NAME = re.compile(r"[A-Za-z0-9._/-]{0,80}")
"""A valid name of a module, package or file. Other names from a host are not repeated in a suggested command."""
HINT = "the traceback above is from the script"
IN_LOOP_HINT = f"{HINT}; the host has been told"
GUEST_HINT = (
    "the script runs here up to its loop: give the data set as a function (it is not called on guests), "
    "and send modules along with `potluck host SCRIPT --send FILE`"
)


def host_script(session: Session, path: Path, arguments: Sequence[str]) -> None:
    """Run a script to its end, whose loop trains the session's run. Raises an error if it never reaches its loop.

    `sys.exit()` is an end like any other, except with the status of a failure, or if the script was asked for help.
    """
    with running(path.name):
        try:
            run_file(path, arguments)
        except SystemExit as left:
            if left.code not in (None, 0) or {"-h", "--help"} & set(arguments):
                raise
        session.check_began()


@contextmanager
def running(
    name: str, *, hint: Callable[[], str] = lambda: HINT, guest: bool = False, sent: Sequence[str] = ()
) -> Iterator[None]:
    """Print the traceback of a script's exception and raise ScriptError. `hint` is called after the failure.

    `sent`: names of the files that came with the script.
    """
    try:
        yield
    except (PotluckError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise Interrupted from None  # its print() came before anybody had noticed
        frames = traceback.extract_tb(error.__traceback__)
        ours = ("runpy", "potluck/cli", "potluck/fleet")
        inner = [f for f in frames if not any(part in f.filename.replace("\\", "/") for part in ours)]
        print("Traceback (most recent call last):", file=sys.stderr)
        sys.stderr.writelines(traceback.format_list(inner))
        sys.stderr.writelines(traceback.format_exception_only(error))
        advice = hint()
        if isinstance(error, FileNotFoundError):
            if file := _among(sent, error.filename):
                advice = f"{file} was sent; it is next to the script: open it with Path(__file__).parent / {file!r}"
            elif sent and (file := _beside(name, inner, error.filename)):
                advice = (
                    f"on the host: potluck host SCRIPT --send {file}, and open it with Path(__file__).parent / "
                    f"{file!r}; for a data set, give a function instead (it is not called on guests)"
                )
        if guest and isinstance(error, TypeError) and "NoneType" in str(error) and _use_loss(inner):
            advice += "; step.loss is None on a guest: use it only where run.is_host is true"
        if isinstance(error, ModuleNotFoundError) and error.name:
            module = error.name.partition(".")[0]
            advice = guest_hint({module: ""}) if guest else f"pip install {module}; or is it a file of yours?"
        raise ScriptError(f"{name} failed with {type(error).__name__}: {error}", hint=advice) from error


def _among(sent: Sequence[str], wanted: object) -> str | None:
    """The sent file that the script tried to open in the working folder."""
    if not isinstance(wanted, str | PurePath):
        return None
    path = PurePosixPath(PurePath(wanted).as_posix())
    same = [name for name in sent if not path.is_absolute() and PurePosixPath(name).parts == path.parts]
    return next(iter(same or (name for name in sent if PurePosixPath(name).name == path.name)), None)


def _beside(script: str, frames: Sequence[traceback.FrameSummary], wanted: object) -> str | None:
    """The path of a file from the script's folder, if it would be in there and its name can be shown."""
    if not isinstance(wanted, str | PurePath):
        return None
    path = PurePath(wanted)
    folders = [file.parent for frame in frames if (file := PurePath(frame.filename)).name == script]
    if folders and path.is_relative_to(folders[0]):
        path = path.relative_to(folders[0])
    name = path.as_posix()
    plain = path.name and not path.is_absolute() and ".." not in path.parts
    return name if plain and PLAIN_NAME.fullmatch(name) else None


def _use_loss(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether a failed line, or a line that called it, reads a `.loss`."""
    return any(re.search(r"\.loss\b(?!\s*\()", frame.line or "") for frame in frames)
