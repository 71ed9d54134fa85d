"""The files of faults that come with Potluck, and how one is found by name or by path. It strikes nobody.

    sleepy-laptop   falls asleep twice, once only briefly
    bad-wifi        a link that is slow, late, silent and reset
    power-cut       a guest that is killed and started again

Each is a TOML file beside this one; it strikes the rig's first guest.
"""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path

from potluck.errors import ConfigError
from potluck.spec import faults
from potluck.spec.faults import FaultPlan

NAMES = ("sleepy-laptop", "bad-wifi", "power-cut")


def load(name_or_path: str) -> FaultPlan:
    """The built-in plan of this name, or the one that a TOML file describes."""
    return faults.loads(_text(name_or_path), name_or_path)


def _text(name_or_path: str) -> str:
    if name_or_path in NAMES:
        return resources.files(__name__).joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")
    looks_like_a_path = name_or_path.endswith(".toml") or "/" in name_or_path or os.sep in name_or_path
    if not looks_like_a_path and not Path(name_or_path).is_file():
        near = difflib.get_close_matches(name_or_path, NAMES, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"there are no faults called {name_or_path!r}",
            hint=f"{advice}faults: {', '.join(NAMES)}; or the path of a TOML file",
        )
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {name_or_path}: {error.strerror or error}", hint="give a file of faults"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name_or_path} is not a text file: {error}", hint="give a file of faults") from error
