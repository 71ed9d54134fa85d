"""The names of the codecs, and the error for an unknown one. Imports no torch, because the command line uses it."""

from __future__ import annotations

from difflib import get_close_matches

from potluck.balance.codecs import AUTO, DEFAULT_TOPK_RATIO
from potluck.errors import ConfigError

NAMES: tuple[str, ...] = ("none", "fp16", "bf16", "int8", "int4", "thin", "topk")

DEFAULT_STEP = 1.0
"""Default argument of thin: a block's step in root mean squares of its values."""
DOWN_THIN = "thin:1.25"
BF16_CHANGES = "bf16-changes"
"""Not a codec of a run: how weights' changes are sent if all guests compute in bf16; see `changes.py`."""
LEAST_STEP, MOST_STEP = 0.25, 4.0


def parse(name: str) -> tuple[str, float | None]:
    """Split a codec's name into its family and its argument: topk's share of the values that it keeps, thin's step.

    "int4" -> ("int4", None), "topk" -> ("topk", 0.01), "topk:0.05" -> ("topk", 0.05), "thin" -> ("thin", 1.0)
    """
    family, colon, text = name.strip().lower().partition(":")
    if family not in NAMES:
        raise ConfigError(f"unknown codec {name!r}", hint=_nearest(family))
    if family not in ("topk", "thin"):
        if colon:
            raise ConfigError(f"codec {family!r} takes no argument, but got {name!r}", hint=f"use {family!r}")
        return family, None
    if not colon:
        return family, DEFAULT_TOPK_RATIO if family == "topk" else DEFAULT_STEP
    try:
        argument = float(text)
    except ValueError:
        argument = -1.0
    if family == "thin":
        if not LEAST_STEP <= argument <= MOST_STEP:
            raise ConfigError(
                f"codec {name!r}: {text!r} is not a step in root mean squares of a block",
                hint=f"give a number from {LEAST_STEP} to {MOST_STEP:g}, for example 'thin:1.25', or just 'thin'",
            )
    elif not 0.0 < argument <= 1.0:
        raise ConfigError(
            f"codec {name!r}: {text!r} is not a share of the values",
            hint="give a number above 0 and at most 1, for example 'topk:0.01' for one value in a hundred",
        )
    return family, argument


def check(name: str) -> None:
    """Raises ConfigError unless a run can have this codec."""
    if not is_auto(name):
        parse(name)


def is_auto(codec: str) -> bool:
    return codec.strip().lower() == AUTO


def first_of(codec: str) -> str:
    """The codec of gradients that a run starts with."""
    return "int4" if is_auto(codec) else codec


def parse_collective(name: str) -> tuple[str, float | None]:
    """Like `parse`, for the all-reduces of torch.distributed, where the length of every message is known in
    advance."""
    family, argument = parse(name)
    if family == "thin":
        raise ConfigError(f"codec {name!r} is for a host and its guests only", hint="use 'int4'")
    return family, argument


def down_of(codec: str) -> str:
    """The codec of the weights' changes for this one of the gradients.

    For topk, which would drop too much, it is int8. For thin it is thin:1.25, because changes tolerate larger steps
    than gradients (docs/log.md).
    """
    family, argument = parse(codec)
    if family == "topk":
        return "int8"
    return DOWN_THIN if family == "thin" and argument == DEFAULT_STEP else codec


def downs_of(down: str | None) -> tuple[str, str]:
    """With auto: the codecs of the weights' changes for int4 and for thin, unless one is given."""
    return (down, down) if down else (down_of("int4"), DOWN_THIN)


def _nearest(family: str) -> str:
    everything = "the codecs are " + ", ".join(NAMES) + ", and auto for a run"
    close = get_close_matches(family, NAMES, n=1, cutoff=0.4)
    return f"did you mean {close[0]}? {everything}" if close else everything
