"""Finds a codec by its name."""

from __future__ import annotations

import sys

from potluck.codec.block import Int4Codec, Int8Codec
from potluck.codec.half import HalfCodec
from potluck.codec.interface import Codec
from potluck.codec.names import parse
from potluck.codec.none import NoneCodec
from potluck.codec.thin import ThinCodec
from potluck.codec.topk import TopkCodec
from potluck.errors import ConfigError


class Codecs:
    """Codecs by name, made once, one of which is the default. Usable from any thread."""

    def __init__(self, first: str | Codec) -> None:
        self.first = get(first) if isinstance(first, str) else first
        self._made: dict[str, Codec] = {"": self.first}

    @property
    def likely(self) -> tuple[Codec, ...]:
        """The codecs that a run may use: one that begins with int4 may switch to thin."""
        return (self.first, get("thin")) if isinstance(self.first, Int4Codec) else (self.first,)

    def called(self, name: str) -> Codec:
        """Raises ConfigError if there is no such codec."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = get(name)
        return found


def get(name: str) -> Codec:
    """The codec called `name`. `get(codec.name)` packs in the same way, so a name can be sent.

    Raises:
        ConfigError: there is no such codec; the hint names the nearest one.
    """
    family, argument = parse(name)
    # Payloads are little-endian by definition and are made by viewing tensors as bytes, which is the same
    # thing on a little-endian machine only.
    if sys.byteorder != "little":
        raise ConfigError(
            "codecs need a little-endian machine, and this one is big-endian", hint="leave it out of the run"
        )
    if family == "none":
        return NoneCodec()
    if family in ("fp16", "bf16"):
        return HalfCodec(family)
    if family == "int8":
        return Int8Codec()
    if family == "int4":
        return Int4Codec()
    assert argument is not None, "parse() gives thin and topk an argument"
    return ThinCodec(argument) if family == "thin" else TopkCodec(argument)
