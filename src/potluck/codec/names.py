"""The names of the codecs, and the error for an unknown one. Imports no torch, because the command line uses it."""

from __future__ import annotations

from difflib import get_close_matches

from potluck.errors import ConfigError

NAMES: tuple[str, ...] = ("none", "fp16", "bf16", "int8", "int4", "topk")

DEFAULT_TOPK_RATIO = 0.01


def parse(name: str) -> tuple[str, float | None]:
    """Split a codec's name into its family and, for topk alone, the share of the values that it keeps.

    "int4" -> ("int4", None), "topk" -> ("topk", 0.01), "topk:0.05" -> ("topk", 0.05)
    """
    family, colon, argument = name.strip().lower().partition(":")
    if family not in NAMES:
        raise ConfigError(f"unknown codec {name!r}", hint=_nearest(family))
    if family != "topk":
        if colon:
            raise ConfigError(f"codec {family!r} takes no argument, but got {name!r}", hint=f"use {family!r}")
        return family, None
    if not colon:
        return family, DEFAULT_TOPK_RATIO
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(
            f"codec {name!r}: {argument!r} is not a share of the values",
            hint="give a number above 0 and at most 1, for example 'topk:0.01' for one value in a hundred",
        )
    return family, ratio


def _nearest(family: str) -> str:
    everything = "the codecs are " + ", ".join(NAMES)
    close = get_close_matches(family, NAMES, n=1, cutoff=0.4)
    return f"did you mean {close[0]}? {everything}" if close else everything
