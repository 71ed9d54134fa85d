"""Secrets of a run as they could appear somewhere, and where they do: for tests and the campaign.

It knows the files that may hold them, `token` and `keys.json`, and looks at everything else.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from zmq.utils import z85

MAY_HOLD_SECRETS = ("token", "keys.json")
_SHORTEST = 16
"""A piece of a secret this long counts: nobody finds that by chance."""


def spellings(secret: bytes) -> Iterator[bytes]:
    """A key of 32 bytes as a careless program might write it."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    yield secret.hex(" ").encode()
    yield secret.hex(":").encode()
    yield z85.encode(secret)
    yield repr(secret)[2:-1].encode()
    yield repr(secret)[2:-1].replace("\\", "\\\\").encode()  # inside a JSON string
    yield json.dumps(list(secret))[1:-1].encode()
    yield json.dumps(list(secret), separators=(",", ":"))[1:-1].encode()
    yield json.dumps(secret.decode("latin-1"))[1:-1].encode()
    yield secret.decode("latin-1").encode()
    yield str(int.from_bytes(secret, "big")).encode()
    yield str(int.from_bytes(secret, "little")).encode()
    # Within something longer, base64 has three ways to write the same bytes; only the middle is the secret's alone.
    for shift in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(shift) + secret)[4 if shift else 0 : -4]


def needles(run: Path) -> dict[bytes, str]:
    """What must be nowhere else than in a run's own two files, and what each is."""
    found: dict[bytes, str] = {}
    token = (run / "token").read_bytes().strip()
    for start in range(0, len(token) - _SHORTEST, _SHORTEST):
        # Not the part that says where the host is: that is no secret.
        if start >= 40:
            found[token[start : start + _SHORTEST]] = f"the token from character {start} on"
    keys = json.loads((run / "keys.json").read_text())
    for name in ("secret", "guest_secret"):
        for spelling in spellings(bytes.fromhex(keys[name])):
            found[spelling] = f"the key {name!r}"
    return found


def leaks(run: Path, outputs: Sequence[Path] = ()) -> list[str]:
    """Where a run's secrets are, apart from their own files; the line that `potluck host` prints is none."""
    wanted = needles(run)
    found = []
    for path in [*sorted(p for p in run.rglob("*") if p.is_file()), *outputs]:
        if path.parent == run and path.name in MAY_HOLD_SECRETS:
            continue
        content = path.read_bytes()
        if path in outputs:
            content = b"\n".join(line for line in content.splitlines() if not _tells_token(line))
        found += [f"{path.name} holds {what}" for needle, what in wanted.items() if needle in content]
    return found


def _tells_token(line: bytes) -> bool:
    return line.lstrip().startswith(b"potluck join potluck")
