"""Owns how a recipe's Config is made from words: unknown keys, wrong types and their hints.

It knows dataclasses of scalars, no recipe in particular, and imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from potluck.errors import ConfigError

C = TypeVar("C")


def build(config_type: type[C], values: Mapping[str, Any]) -> C:
    """A config from names and values; values may be strings, as flags are. Names may have dashes."""
    hints = typing.get_type_hints(config_type)
    known = [field.name for field in dataclasses.fields(typing.cast(Any, config_type))]
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"there is no setting {key!r}", hint=f"{hint}settings: {', '.join(known)}")
        given[name] = _convert(name, value, hints[name])
    return config_type(**given)


def field_docs(config_type: type) -> dict[str, str]:
    """The docstring that stands under each field, by the field's name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_type)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type, or an error that says what the field takes."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None:
            return None
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        takes = ("did you mean " + near[0] + "? " if near else "") + f"{name} is one of {', '.join(choices)}"
        raise ConfigError(f"{name} is {value!r}", hint=takes)
    try:
        if hint is int and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
        if hint is float and not isinstance(value, bool):
            return float(value)
        if hint is str and isinstance(value, str):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = {int: "a whole number", float: "a number", str: "text"}[hint]
    raise ConfigError(f"{name} is {value!r}", hint=f"{name} must be {wanted}")
