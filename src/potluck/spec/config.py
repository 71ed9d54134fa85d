"""Configs: what a run is started with, and how one is made from words (flags, a TOML file). Knows no torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from potluck.errors import ConfigError

C = TypeVar("C")

MOST_GUESTS = 64
"""Guests that one host admits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a run is carried out, whatever it trains."""

    device: str | None = None
    """cpu, cuda, mps, paced:SECONDS; the best there is when not given."""
    threads: int | None = None
    """CPU threads for torch; the physical cores when not given."""
    name: str | None = None
    """What this machine is called in logs and tables; the host name when not given."""
    micro_batch: int | None = None
    """Samples computed at once on this machine; found by trying when not given."""
    codec: str = "int4"
    """How weights' changes and gradients are packed: none, fp16, bf16, int8, int4, topk:RATIO."""
    codec_down: str | None = None
    """The codec of the weights' changes where it should differ; a topk codec falls back to int8 here."""
    bind: str | None = None
    """The address to listen on; the one of the default route when not given, 0.0.0.0 for all."""
    port: int = 0
    """The port to listen on; a free one when 0."""
    wait_for: int = 0
    """Guests to wait for before the first step."""
    wait_s: float = 120.0
    """How long to wait for them."""
    replica: Literal["auto", "device", "host"] = "auto"
    """Where the host keeps what its guests hold, 4 bytes a parameter: on its device, or in host memory (auto, on a
    GPU)."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for only one at the end."""
    check_replica_every: int = 50
    """Steps between two comparisons of the guests' weights with the host's replica, by hash, and of its ranks
    with each other; 0 for none."""

    max_bad_steps: int = 5
    """So many steps in a row whose gradient is not finite end the run; 0: none does."""
    guest_bound: float = 1000.0
    """A guest's gradient counts up to so many times the host's own a sample, by its norm; 0: however large."""

    def __post_init__(self) -> None:
        least = {"threads": 1, "micro_batch": 1, "port": 0, "wait_for": 0, "wait_s": 0, "checkpoint_every": 0}
        least |= {"check_replica_every": 0, "max_bad_steps": 0, "guest_bound": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"{name} is {value}", hint=f"{name} must be at least {smallest}")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}", hint="ports end at 65535; 0 takes a free one")


def did_you_mean(word: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """How a hint begins: with the most similar known word (as `shown` spells it), or not at all."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {(shown or {}).get(close[0], close[0])}? " if close else ""


def nearest(word: str, words: list[str]) -> str:
    """A hint that names the most similar valid word, and all of them."""
    return did_you_mean(word, words) + "valid: " + ", ".join(sorted(words))


def build(config_type: type[C], values: Mapping[str, Any]) -> C:
    """A config from names and values; values may be strings, as flags are. Names may have dashes."""
    hints = typing.get_type_hints(config_type)
    known = [field.name for field in dataclasses.fields(typing.cast(Any, config_type))]
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"there is no setting {key!r}", hint=f"{hint}settings: {', '.join(known)}")
        given[name] = _convert(name, value, hints[name])
    return config_type(**given)


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
        # Not by way of float: seeds of 64 bits are not all floats.
        if hint is int and not isinstance(value, bool) and (isinstance(value, str) or int(value) == value):
            return int(value)
        if hint is float and not isinstance(value, bool) and not math.isnan(float(value)):
            return float(value)
        if hint is str and isinstance(value, str):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = {int: "a whole number", float: "a number", str: "text"}[hint]
    raise ConfigError(f"{name} is {value!r}", hint=f"{name} must be {wanted}")
