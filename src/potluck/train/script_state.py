"""`run.state`: the script's own values that a checkpoint keeps, such as the best loss so far.

Owns the rules for its values. `checkpoint` writes and reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from potluck.bounds import Named
from potluck.errors import LoopError
from potluck.train.optimizer_state import Json, Stateful, flatten

OF = "run.state"


class StateEntry(Struct, frozen=True, kw_only=True):
    """`run.state` in a checkpoint's manifest."""

    values: Named[Json] = {}
    objects: Named[Json] = {}
    """The state_dicts of its objects."""


class ScriptState(dict[str, Any]):
    """A dictionary of values that a checkpoint can hold. Any other value is refused at the assignment.

    A value is a number, a string, None, a dense tensor, a list, tuple or dictionary of these, or an object with
    `state_dict()` and `load_state_dict()`.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        check(key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **named: Any) -> None:
        for key, value in dict(*given, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> ScriptState:  # type: ignore[override,misc]
        self.update(other)
        return self


def check(key: Any, value: Any) -> None:
    """Raise an error that names the key, if a checkpoint cannot hold it or its value."""
    if not isinstance(key, str):
        raise LoopError(
            f"run.state has the key {key!r}, which is a {type(key).__name__}", hint="its keys are strings"
        )
    if not is_stateful(value):
        flatten(value, key, {}, of=OF)


def is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Stateful]]:
    """The plain values, and the states of the objects."""
    objects = {key: value for key, value in state.items() if is_stateful(value)}
    return {key: value for key, value in state.items() if key not in objects}, objects


def misfit(state: Mapping[str, Any], saved: StateEntry) -> str:
    """Why a checkpoint's `saved` state does not fit what the script has put in; empty if it does."""
    _, objects = split(state)
    for key in saved.objects:
        if key not in objects:
            return f"run.state[{key!r}] is an object there, and here there was none when run.steps() was called"
    for key in saved.values:
        if key in objects:
            return f"run.state[{key!r}] is a plain value there and an object here"
    return ""
