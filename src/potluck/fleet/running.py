"""Runs a user's script and shows its exceptions as Python does, without Potluck's frames."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from potluck.errors import PotluckError, ScriptError
from potluck.fleet.life import reader_is_gone
from potluck.fleet.script import guest_hint
from potluck.train.ending import Interrupted

HINT = "the traceback above is from the script"
IN_LOOP_HINT = f"{HINT}; the host has been told"
GUEST_HINT = (
    "the script runs here up to its loop: give the data set as a function (it is not called on guests), "
    "and send modules along with `potluck host SCRIPT --send FILE`"
)


@contextmanager
def running(name: str, *, hint: Callable[[], str] = lambda: HINT, guest: bool = False) -> Iterator[None]:
    """Print the traceback of what the script raises and raise ScriptError. `hint` is called after the failure."""
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
        if guest and isinstance(error, TypeError) and "NoneType" in str(error):
            advice += "; step.loss is None on a guest: use it only where run.is_host is true"
        if isinstance(error, ModuleNotFoundError) and error.name:
            module = error.name.partition(".")[0]
            advice = guest_hint({module: ""}) if guest else f"pip install {module}; or is it a file of yours?"
        raise ScriptError(f"{name} failed with {type(error).__name__}: {error}", hint=advice) from error
