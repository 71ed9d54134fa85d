"""The built-in files of faults, found by name or by path.

    sleepy-laptop   falls asleep twice, once only briefly
    bad-wifi        a link that is slow, late, silent and reset
    power-cut       a guest that is killed and started again

Each is a TOML file beside this one. Its faults affect the rig's first guest.
"""

from __future__ import annotations

from pathlib import Path

from potluck.errors import ConfigError
from potluck.lab import builtin
from potluck.spec import faults
from potluck.spec.faults import FaultPlan
from potluck.spec.rig import Rig

NAMES = ("sleepy-laptop", "bad-wifi", "power-cut")


def load(name_or_path: str) -> FaultPlan:
    """The built-in plan of this name, or the one that a TOML file describes."""
    return faults.loads(_text(name_or_path), name_or_path)


def load_for(name_or_path: str, rig: Rig) -> FaultPlan:
    """The plan with its machines found in this rig."""
    try:
        return load(name_or_path).on(rig)
    except ConfigError as error:
        raise ConfigError(f"{name_or_path}: {error.what}", hint=error.hint) from error


def _text(name_or_path: str) -> str:
    found = builtin.text_of(__name__, NAMES, name_or_path, unknown="there are no faults called", several="faults")
    return faults.read_text(Path(name_or_path)) if found is None else found
