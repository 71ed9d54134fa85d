"""What a host tells its guests: owns which messages a guest believes, and cleans the words in them.

PURE. A message is looked at once, where it comes in: what passes has the fields that its kind needs, of the right
type. Kinds that this version does not know pass as they are; nobody acts on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from potluck.errors import WireError
from potluck.units import printable
from potluck.wire.frames import Message

MOST_SIZES = 4096
"""Micro-batches of one lease; a host makes 512 at most."""
LONGEST_NAME, LONGEST_WORDS = 80, 500
_LARGEST = 1 << 62
_SAME = "install the same version of potluck on both machines; a host of somebody else's may not mean well"

Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and -_LARGEST <= value <= _LARGEST


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MOST_SIZES and all(_count(n) and n > 0 for n in value)


def _source(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "recipe" in value:
        return _text(value["recipe"]) and isinstance(value.get("config"), dict)
    imports = value.get("imports", {})
    if not isinstance(imports, dict) or not _words(list(imports.values())):
        return False
    return _words(value.get("files")) and _words(value.get("arguments")) and _text(value.get("sha256"))


NEEDED: Mapping[str, Mapping[str, Check]] = {
    "welcome": {
        **dict.fromkeys(("name", "host", "run", "codec", "codec_down"), _text),
        "versions": lambda value: isinstance(value, dict),
        "source": _source,
    },
    "tensor": {"name": _text, "start": _count},
    "whole": {"piece": _count, "version": _count},
    "change": {"piece": _count, "base": _whole, "version": _count},
    "check": {"check": _count, "step": _count, "sizes": _sizes},
    "lease": {"lease": _count, "step": _count, "sizes": _sizes},
    "samples": {"lease": _whole, "batch": _count, "tree": lambda value: True},
    "revoke": {"lease": _whole},
    "hash": {"version": _count},
    "resync": {"version": _count},
    "note": {"text": _text},
}
ALLOWED: Mapping[str, Mapping[str, Check]] = {
    "check": {"seed": _count},
    "lease": {"quota": _count, **dict.fromkeys(("within_s", "host_sample_s", "transfer_s", "tail_s"), _real)},
}
"""Fields that may be missing."""
SHOWN: Mapping[str, Mapping[str, int]] = {
    "welcome": dict.fromkeys(("name", "host", "run", "codec", "codec_down"), LONGEST_NAME),
    "refuse": {"reason": LONGEST_WORDS, "hint": LONGEST_WORDS},
    "note": {"text": LONGEST_WORDS},
    "bye": {"reason": LONGEST_WORDS},
    "wait": {"reason": LONGEST_WORDS},
}
"""Words that a person gets to see, and how long they may be."""
_ONE_FRAME = ("tensor", "whole", "change")


def checked(message: Message) -> Message:
    """The message with clean words; WireError for one that lacks what its kind needs."""
    kind, fields = message.kind, message.fields
    for name, is_right in NEEDED.get(kind, {}).items():
        if name not in fields:
            raise _bad(kind, f"it has no {name!r}")
        if not is_right(fields[name]):
            raise _bad(kind, f"its {name!r} is {fields[name]!r:.60}")
    for name, is_right in ALLOWED.get(kind, {}).items():
        if name in fields and not is_right(fields[name]):
            raise _bad(kind, f"its {name!r} is {fields[name]!r:.60}")
    if kind in _ONE_FRAME and len(message.frames) != 1:
        raise _bad(kind, f"it has {len(message.frames)} frames, not one")
    if kind in ("lease", "check") and message.frames and len(message.frames[0]) != 8 * sum(fields["sizes"]):
        raise _bad(kind, f"it has {len(message.frames[0])} bytes of indices for {sum(fields['sizes'])} samples")
    words = {
        name: printable(fields[name], limit)
        for name, limit in SHOWN.get(kind, {}).items()
        if fields.get(name) is not None
    }
    return Message(kind=kind, fields={**fields, **words}, frames=message.frames)


def _bad(kind: str, why: str) -> WireError:
    return WireError(f"the host sent a {kind!r} that cannot be read: {why}", hint=_SAME)
