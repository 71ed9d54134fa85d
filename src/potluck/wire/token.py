"""The token that a guest types, the addresses of this machine that it contains, and the one to listen on.

potluck<protocol>-<base64url of: port, addresses, the host's public key, the guests' secret key, CRC-32>
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import socket
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from potluck.errors import ConfigError, TokenError
from potluck.wire.frames import PROTOCOL
from potluck.wire.keys import KEY_BYTES

LOOPBACK = "127.0.0.1"
MAX_ADDRESSES = 8
_MAX_NAME_BYTES = 64
_MAX_TEXT = 4096
_SHAPE = re.compile(r"potluck(\d{1,3})-(.*)", re.DOTALL | re.ASCII)
_AGAIN = "copy the whole line that the host printed, from `potluck join` to its end"

# A name in this table belongs to containers or virtual machines: no other machine can reach its address.
_INNER = re.compile(
    r"docker|br-|veth|virbr|vmnet|vboxnet|cni|flannel|cali|podman|lxc|lxdbr|bridge1\d\d|vethernet",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What a guest needs to reach a host and to be admitted."""

    protocol: int = PROTOCOL
    addresses: tuple[str, ...]
    """Addresses or names of the host, the most likely first."""
    port: int
    host_public: bytes
    guest_secret: bytes = field(repr=False)


def encode(token: Token) -> str:
    """The token as text."""
    if not 1 <= len(token.addresses) <= MAX_ADDRESSES:
        raise ConfigError(f"a token takes 1 to {MAX_ADDRESSES} addresses, not {len(token.addresses)}")
    if not 0 < token.port < 65536:
        raise ConfigError(f"{token.port} is not a port", hint="ports are 1 to 65535")
    if len(token.host_public) != KEY_BYTES or len(token.guest_secret) != KEY_BYTES:
        raise ConfigError(f"keys have {KEY_BYTES} bytes")
    where = b"".join(_pack_address(address) for address in token.addresses)
    body = struct.pack(">HB", token.port, len(token.addresses)) + where + token.host_public + token.guest_secret
    prefix = f"potluck{token.protocol}-"
    return prefix + _base64(body + _checksum(prefix, body))


def decode(text: str) -> Token:
    """The token in a copied text; line breaks, spaces and `potluck join` before it are allowed."""
    word = "".join(text[:_MAX_TEXT].split()).strip("`'\"")
    match = _SHAPE.search(word)
    if match is None:
        raise TokenError("this is not a potluck token", hint=_AGAIN)
    version, payload = match.groups()
    if int(version) != PROTOCOL:
        raise TokenError(
            f"this token is of protocol {int(version)}, this machine uses {PROTOCOL}",
            hint="install the same version of potluck on both machines",
        )
    try:
        body = _body_of(f"potluck{version}-", payload)
        return _parse(body)
    except (ValueError, struct.error, IndexError):
        # No quoting and no cause: the text is most of a secret.
        raise TokenError("this token is damaged: its checksum does not match", hint=_AGAIN) from None


def _body_of(prefix: str, payload: str) -> bytes:
    try:
        raw = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError from error
    body, checksum = raw[:-4], raw[-4:]
    # The last character has bits that decode to nothing: only its one right spelling is taken.
    if _base64(raw) != payload or checksum != _checksum(prefix, body):
        raise ValueError("checksum")
    return body


def _parse(body: bytes) -> Token:
    port, count = struct.unpack_from(">HB", body)
    at = 3
    addresses = []
    for _ in range(count):
        address, at = _unpack_address(body, at)
        addresses.append(address)
    keys = body[at:]
    if len(keys) != 2 * KEY_BYTES or not port or not 1 <= count <= MAX_ADDRESSES:
        raise ValueError("length")
    return Token(addresses=tuple(addresses), port=port, host_public=keys[:KEY_BYTES], guest_secret=keys[KEY_BYTES:])


def _pack_address(address: str) -> bytes:
    try:
        return b"\0" + ipaddress.IPv4Address(address).packed
    except ValueError:
        name = address.encode("utf-8")
    if not 0 < len(name) <= _MAX_NAME_BYTES or any(character.isspace() for character in address):
        raise ConfigError(f"{address!r} is not an address that fits into a token")
    return bytes([len(name)]) + name


def _unpack_address(body: bytes, at: int) -> tuple[str, int]:
    size = body[at]
    if size == 0:
        return str(ipaddress.IPv4Address(body[at + 1 : at + 5])), at + 5
    return body[at + 1 : at + 1 + size].decode("utf-8"), at + 1 + size


def _checksum(prefix: str, body: bytes) -> bytes:
    # A CRC-32 finds every error within 32 neighbouring bits, so any one or two wrong characters in a row.
    return struct.pack(">I", zlib.crc32(prefix.encode() + body))


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")


def is_inner(interface: str) -> bool:
    """Whether an interface of this name belongs to containers or virtual machines."""
    return _INNER.match(interface) is not None


def is_this_machine(address: str) -> bool:
    """Whether a connection from this address comes from this machine itself."""
    try:
        if ipaddress.ip_address(address).is_loopback:
            return True
    except ValueError:
        return False
    return any(entry.address == address for entries in psutil.net_if_addrs().values() for entry in entries)


def local_addresses(*, ipv6: bool = False) -> tuple[str, ...]:
    """This machine's addresses that another machine may reach, the one of the default route first.

    IPv4 addresses, followed by IPv6 if requested, without link-local ones, which need the name of an interface.

    Addresses of containers' bridges are included only if there are no others, and loopback only if there are none
    at all. Those of VPNs such as Tailscale's (100.64.0.0/10) count; self-assigned ones come last.
    """
    states = psutil.net_if_stats()
    outer: list[str] = []
    inner: list[str] = []
    for name, entries in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for entry in entries:
            if entry.family != socket.AF_INET or ipaddress.IPv4Address(entry.address).is_loopback:
                continue
            (inner if is_inner(name) else outer).append(entry.address)
    first = source_address()
    found = sorted(
        set(outer or inner),
        key=lambda address: (
            address != first,
            ipaddress.IPv4Address(address).is_link_local,
            address.startswith("100."),
            (outer or inner).index(address),
        ),
    )
    found = found[: MAX_ADDRESSES // 2 if ipv6 else MAX_ADDRESSES] + (_ipv6_addresses(states) if ipv6 else [])
    return tuple(found[:MAX_ADDRESSES]) or (LOOPBACK,)


def cables_first(addresses: Sequence[str]) -> tuple[str, ...]:
    """The same addresses, those of Thunderbolt cables first: guests take the first that answers.

    Self-assigned ones keep their place, because a cable without a configured address may lead anywhere.
    """
    cables = {
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if name.startswith("thunderbolt") or (sys.platform == "darwin" and name == "bridge0")
        for entry in entries
        if entry.family == socket.AF_INET and not ipaddress.IPv4Address(entry.address).is_link_local
    }
    return tuple(sorted(addresses, key=lambda address: address not in cables))


def checked_bind(bind: str | None, *, ipv6: bool = True) -> str | None:
    """The numeric address to listen on; None if none was given. `ipv6`: whether IPv6 is allowed."""
    if bind is None:
        return None
    try:
        address = ipaddress.ip_address(LOOPBACK if bind == "localhost" else bind.strip("[]"))
    except ValueError:
        address = None
    if address is not None and (ipv6 or address.version == 4):
        return str(address)
    raise ConfigError(
        f"bind takes an {'' if ipv6 else 'IPv4 '}address of this machine, not {bind!r}",
        hint=f"this machine has: {', '.join((*local_addresses(ipv6=ipv6), LOOPBACK))}; 0.0.0.0 listens on all"
        + ("; :: also on IPv6" if ipv6 else "; only `potluck host` listens on IPv6"),
    )


def _ipv6_addresses(states: Mapping[str, Any]) -> list[str]:
    return [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if (name not in states or states[name].isup) and not is_inner(name)
        for entry in entries
        if entry.family == socket.AF_INET6 and _is_everywhere(entry.address)
    ]


def _is_everywhere(address: str) -> bool:
    number = ipaddress.IPv6Address(address.partition("%")[0])
    return not (number.is_link_local or number.is_loopback)


def source_address(to: str = "192.0.2.1") -> str | None:
    """The source address of packets to an address, by default one in the internet. Connecting a UDP socket only
    looks up the route; nothing is sent."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
