"""The two CURVE key pairs of a run, the host's and the one its guests share, and their file."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from zmq.utils import z85

from potluck import checked, durable
from potluck.errors import RunFolderError

KEY_BYTES = 32
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKeys:
    """The keys by which guests recognise their host, and a host its guests; raw keys of 32 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    guest_public: bytes
    guest_secret: bytes = field(repr=False)


HexKey = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$", max_length=2 * KEY_BYTES)]


class _KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `HostKeys`."""

    public: HexKey
    secret: HexKey
    guest_public: HexKey
    guest_secret: HexKey


_NAMES = _KeyFile.__struct_fields__


def new_keys() -> HostKeys:
    """Two fresh key pairs."""
    public, secret = zmq.curve_keypair()
    guest_public, guest_secret = zmq.curve_keypair()
    return HostKeys(
        public=z85.decode(public),
        secret=z85.decode(secret),
        guest_public=z85.decode(guest_public),
        guest_secret=z85.decode(guest_secret),
    )


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret one."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def save_keys(path: str | Path, keys: HostKeys) -> None:
    """Write the keys, readable only by this user at any moment; replaces the file atomically."""
    path = Path(path)
    text = checked.to_json(_KeyFile(**{name: getattr(keys, name).hex() for name in _NAMES})) + "\n"
    try:
        durable.replace(path, text, what="keys", private=True)
    except OSError as error:
        raise RunFolderError(
            f"the keys cannot be written to {path}: {error.strerror or error}",
            hint="check that the folder exists, that you may write there and that the disk is not full",
        ) from None


def load_keys(path: str | Path) -> HostKeys:
    """The keys in a file, checked for size and for matching public and secret keys."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            _keep_private(file.fileno())
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RunFolderError(
            f"the keys cannot be read from {path}: {error.strerror or error}",
            hint="without this file the run needs a new token: start the host with new keys",
        ) from None
    try:
        stored = checked.decode(raw, _KeyFile)
        keys = HostKeys(**{name: bytes.fromhex(getattr(stored, name)) for name in _NAMES})
        whole = (
            len(raw) <= _MAX_FILE_BYTES
            and public_of(keys.secret) == keys.public
            and public_of(keys.guest_secret) == keys.guest_public
        )
    except (msgspec.MsgspecError, RecursionError):
        whole = False
    if not whole:
        # `from None` and no quoting: the text of a damaged file may still be most of a secret.
        raise RunFolderError(
            f"{path} does not hold a run's keys, or is damaged",
            hint="delete the file to make new keys; guests then need the new token",
        )
    return keys


def _keep_private(descriptor: int) -> None:
    """Remove permissions that a copy or an archive added to the file."""
    if os.name == "posix" and os.fstat(descriptor).st_mode & 0o077:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o600)
