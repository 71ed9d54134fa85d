"""Reads TOML files written by users, and reports those that cannot be read."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from potluck.errors import ConfigError

T = TypeVar("T")


def read_text(path: Path, *, missing: str, example: str) -> str:
    """The file's text. `missing` is the hint if it cannot be read, `example` the hint if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=missing) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}", hint=example) from error


def loads(text: str, where: str, parse: Callable[[Mapping[str, Any]], T], *, example: str) -> T:
    """The result of `parse` for a TOML text. Errors begin with `where`."""
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not a TOML file: {error}", hint=example) from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.what}", hint=error.hint) from error
