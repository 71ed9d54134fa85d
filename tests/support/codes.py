"""One exchange of a code without a network, all that a listener sees of it, and the keys that he can compute."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import sha256

from spake2.ed25519_basic import Base, Element, Zero, bytes_to_element
from spake2.parameters.ed25519 import ParamsEd25519

from potluck.wire.code import GREETING, RIGHT, GuestSide, HostSide

TOKEN = "potluck3-" + "s3cret" * 20
CODE = "12-maple-otter"


def exchange(host_code: str, guest_code: str) -> tuple[str | None, list[bytes]]:
    """What the guest got, and all that a listener saw."""
    host, guest = HostSide(host_code, TOKEN), GuestSide(guest_code)
    greeting = guest.greeting()
    reply = host.reply(greeting)
    proof = guest.proof(reply[1:])
    answer = host.answer(proof)
    seen = [greeting, reply, proof, answer or b""]
    if answer is None:
        return None, seen
    assert answer[:1] == RIGHT
    (size,) = struct.unpack(">H", answer[33:35])
    assert len(answer) == 35 + size
    return guest.token(answer[1:33], answer[35:]), seen


def key_of(greeting: bytes, reply: bytes, code: str, shared: bytes) -> bytes:
    """SPAKE2's key, from both messages, the code and the shared element."""
    hashes = (sha256(part).digest() for part in (code.encode(), b"potluck guest", b"potluck host"))
    return sha256(b"".join(hashes) + greeting[len(GREETING) + 1 :] + reply[2:] + shared).digest()


def without_code(greeting: bytes, reply: bytes, code: str) -> tuple[Element, Element]:
    """Both messages with this code taken out: x·G and y·G, if it is the right one."""
    scalar = ParamsEd25519.group.password_to_scalar(code.encode())
    first, second = bytes_to_element(greeting[len(GREETING) + 1 :]), bytes_to_element(reply[2:])
    return first.add(ParamsEd25519.M.scalarmult(-scalar)), second.add(ParamsEd25519.N.scalarmult(-scalar))


def eavesdroppers_keys(greeting: bytes, reply: bytes, code: str) -> Iterator[bytes]:
    """The keys that a listener can compute for a code: he has both messages, and neither side's secret number.

    He has x·G and y·G for every code, and would need x·y·G. He tries what he has.
    """
    x, y = without_code(greeting, reply, code)
    for shared in (Zero, x, y, x.add(y), Base):
        yield key_of(greeting, reply, code, shared.to_bytes())
