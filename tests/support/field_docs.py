"""The docstrings under a config's fields, for tests that each field has one."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import typing


def field_docs(config_type: type) -> dict[str, str]:
    """The docstring that stands under each field, by the field's name; inherited fields too."""
    docs: dict[str, str] = {}
    for base in config_type.__bases__:
        if base.__module__ == config_type.__module__:
            docs |= field_docs(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_type)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
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
