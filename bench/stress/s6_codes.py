"""S6: 10,000 wrong codes let nobody in, and a recorded exchange confirms no code.

    .venv/bin/python bench/stress/s6_codes.py [--times 10000] [--minutes 20] [--json]

Guessing: both sides of real exchanges, without the pauses of a host. A run's codes are used up after nine guesses;
then another run begins, so that all guesses are really made. Searching: every code of the whole space against one
recording, with each key that takes only hashes to compute; and a thousand codes, the right one among them, with the
keys for which the code is taken out of both messages.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from _campaign import begin
from _forks import Trouble

from potluck.wire.code import Codes, _Keys
from potluck.wire.words import WORDS
from support.codes import CODE, TOKEN, eavesdroppers_keys, exchange, key_of

GUESSES = 100
campaign = begin("S6", "wrong codes, and all codes against a recording", times=10_000, minutes=20)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    if number == 0:
        search(chance)
    codes = Codes(12)
    for _ in range(GUESSES):
        if codes.current is None:
            codes = Codes(12)
            campaign.add(runs=1)
        assert codes.current is not None
        guess = codes.current
        while guess == codes.current:
            guess = f"12-{chance.choice(WORDS)}-{chance.choice(WORDS)}"
        token, seen = exchange(codes.current, guess)
        if token is not None or any(TOKEN.encode() in message for message in seen):
            raise Trouble(f"{guess} was let in for {codes.current}")
        codes.wrong()
    return GUESSES


def search(chance: random.Random) -> None:
    """All codes against one recording."""
    token, (greeting, reply, proof, answer) = exchange(CODE, CODE)
    if token != TOKEN:
        raise Trouble("the right code was refused")
    proofs = (proof, answer[1:33])
    shown = [bytes(32), greeting[-32:], reply[-32:]]
    for words in itertools.product(WORDS, WORDS):
        code = f"12-{words[0]}-{words[1]}"
        judge(code, [key_of(greeting, reply, code, shared) for shared in shown], proofs)
        campaign.add(codes_searched=1)
    for number in range(1000):
        code = CODE if not number else f"12-{chance.choice(WORDS)}-{chance.choice(WORDS)}"
        judge(code, list(eavesdroppers_keys(greeting, reply, code)), proofs)
        campaign.add(codes_taken_out=1)


def judge(code: str, keys: list[bytes], proofs: tuple[bytes, bytes]) -> None:
    for key in keys:
        made = _Keys(key)
        if made.guest_proof == proofs[0] or made.host_proof == proofs[1]:
            raise Trouble(f"a recording confirms {code}")


if __name__ == "__main__":
    campaign.run(attempt)
    sys.exit(campaign.end())
