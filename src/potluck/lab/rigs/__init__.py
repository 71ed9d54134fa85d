"""The built-in rigs, found by name or by path.

    home-pair       a host and a guest a quarter as fast
    desk-and-mac    the question everyone asks
    i9-i5           two CPU machines
    twins           two equal machines
    three-friends   three guests on the host's one link
    wifi            a thin link
    thin-twins      two equal machines on a thin link
    internet        a home's link: slow up, fast down, far away
    moody           speeds change, a guest leaves and returns
    hopeless        a guest that cannot help
    photos          samples that need most of the link
    thumbnails      the same with small samples

Each is a TOML file beside this one, with its scaling worked out in a comment.
"""

from __future__ import annotations

from pathlib import Path

from potluck.codec import names as codecs
from potluck.errors import ConfigError
from potluck.lab import builtin
from potluck.spec import rig as rigs
from potluck.spec.rig import Rig

NAMES = (
    "home-pair",
    "desk-and-mac",
    "i9-i5",
    "twins",
    "three-friends",
    "wifi",
    "thin-twins",
    "internet",
    "moody",
    "hopeless",
    "photos",
    "thumbnails",
)


def load(name_or_path: str) -> Rig:
    """The built-in rig of this name, or the one that a TOML file describes."""
    return check(rigs.loads(text(name_or_path), name_or_path), name_or_path)


def check(rig: Rig, where: str) -> Rig:
    """The rig, if all it names exists."""
    try:
        codecs.check(rig.workload.codec)
    except ConfigError as error:
        raise ConfigError(f"{where}: workload: {error.what}", hint=error.hint) from error
    return rig


def text(name_or_path: str) -> str:
    """The rig's file, as it was written."""
    found = builtin.text_of(__name__, NAMES, name_or_path, unknown="there is no rig", several="rigs")
    return rigs.read_text(Path(name_or_path)) if found is None else found
