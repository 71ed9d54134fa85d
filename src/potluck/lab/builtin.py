"""Finds the lab's TOML files by name or by path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from potluck.checked import did_you_mean
from potluck.errors import ConfigError


def text_of(package: str, names: Sequence[str], name: str, *, unknown: str, several: str) -> str | None:
    """The text of the package's file of this name; None if it is a path. Otherwise an error that begins with
    `unknown` and lists the existing ones as `several`."""
    if name in names:
        return resources.files(package).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    if name.endswith(".toml") or "/" in name or os.sep in name or Path(name).is_file():
        return None
    advice = did_you_mean(name, names)
    raise ConfigError(
        f"{unknown} {name!r}", hint=f"{advice}{several}: {', '.join(names)}; or the path of a TOML file"
    )
