"""Files that people write in TOML: owns how one is read, and what is said of one that cannot be.

It must not know what any of them describes: who does gives the parser and the hints.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from potluck.errors import ConfigError

T = TypeVar("T")


def read_text(path: Path, *, missing: str, example: str) -> str:
    """The file's text; `missing` and `example` are the hints for none and for one that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=missing) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}", hint=example) from error


def loads(text: str, where: str, parse: Callable[[Mapping[str, Any]], T], *, example: str) -> T:
    """What `parse` makes of a text's tables; `where` it came from begins what is said about its mistakes."""
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not a TOML file: {error}", hint=example) from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.what}", hint=error.hint) from error
