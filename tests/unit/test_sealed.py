"""Sealed tokens: only the process that made the key reads them."""

from __future__ import annotations

import copy
import pickle

import pytest

from potluck.errors import TokenError
from potluck.fleet.sealed import KEY_BYTES, KeyPair, seal

TOKEN = "potluck3-not-a-real-one"


def test_what_is_sealed_for_a_key_is_read_with_it() -> None:
    keys = KeyPair()
    sealed = seal(TOKEN, keys.public)
    assert TOKEN.encode() not in sealed
    assert keys.open(sealed) == TOKEN
    assert seal(TOKEN, keys.public) != sealed  # nobody sees that two guests got the same


def test_another_key_reads_nothing_and_no_error_quotes_the_token() -> None:
    sealed = seal(TOKEN, KeyPair().public)
    for wrong in (sealed, sealed[:-1], sealed[:KEY_BYTES], b"", bytes(KEY_BYTES + 40)):
        with pytest.raises(TokenError) as caught:
            KeyPair().open(wrong)
        assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("place", [0, KEY_BYTES, -1])
def test_one_changed_bit_is_refused(place: int) -> None:
    keys = KeyPair()
    sealed = bytearray(seal(TOKEN, keys.public))
    sealed[place] ^= 1
    with pytest.raises(TokenError):
        keys.open(bytes(sealed))


def test_a_key_pair_does_not_travel() -> None:
    keys = KeyPair()
    with pytest.raises(TypeError, match="cannot be sent"):
        pickle.dumps(keys)
    with pytest.raises(TypeError, match="cannot be sent"):
        copy.copy(keys)
