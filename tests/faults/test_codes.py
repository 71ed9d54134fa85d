"""Attacks on the code of `potluck host --lan`, in small: guessing, and searching in a recording."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("spake2", reason="needs the extra lan")

from potluck.wire import code as codes_of
from potluck.wire.code import CODES, TRIES, Codes, GuestSide, HostSide
from potluck.wire.words import WORDS
from support.codes import CODE, TOKEN, eavesdroppers_keys, exchange, key_of, without_code


def test_ten_thousand_wrong_codes_let_nobody_in() -> None:
    codes, chance = Codes(12), random.Random(1)
    let_in = exchanges = 0
    for pair in itertools.islice(itertools.product(WORDS, WORDS), 10_000):
        if codes.current is None:
            continue  # the server says OFF
        guess = f"12-{pair[0]}-{pair[1]}"
        if guess == codes.current:
            guess = f"12-{chance.choice(WORDS)}-yak"
        exchanges += 1
        if exchange(codes.current, guess)[0] is not None:
            let_in += 1
        else:
            codes.wrong()
    assert let_in == 0
    assert exchanges == TRIES * CODES


def test_a_recording_confirms_no_code_not_even_the_right_one() -> None:
    """For every code, both messages open to valid elements, and no key that can be computed fits the proofs."""
    token, (greeting, reply, proof, answer) = exchange(CODE, CODE)
    assert token == TOKEN
    for code in (CODE, "12-maple-owl", *(f"12-{word}-otter" for word in WORDS[:10])):
        for key in eavesdroppers_keys(greeting, reply, code):
            keys = codes_of._Keys(key)
            assert keys.guest_proof != proof
            assert keys.host_proof != answer[1:33]


def test_the_attack_on_a_recording_would_find_a_key_that_it_could_compute() -> None:
    """With one side's secret number it does: the formulas above are those of the exchange."""
    host, guest = HostSide(CODE, TOKEN), GuestSide(CODE)
    greeting = guest.greeting()
    reply = host.reply(greeting)
    proof = guest.proof(reply[1:])
    _, y = without_code(greeting, reply, CODE)
    key = key_of(greeting, reply, CODE, y.scalarmult(guest._side.xy_scalar).to_bytes())
    assert codes_of._Keys(key).guest_proof == proof
