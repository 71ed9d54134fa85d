"""Joining by a code: who knows it gets the token, who does not gets nothing, and a listener learns nothing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("spake2", reason="needs the extra lan")

from spake2.ed25519_basic import Base, Zero

from potluck.errors import MissingModuleError, NetworkError, PortTakenError, TokenError, WireError
from potluck.wire import code as codes_of
from potluck.wire.code import (
    CODES,
    GREETING,
    READY,
    TRIES,
    Codes,
    CodeServer,
    GuestSide,
    HostSide,
    WrongCode,
    need_libraries,
    parse_code,
    redeem,
    run_of,
)
from potluck.wire.words import WORDS
from support.codes import CODE, TOKEN, exchange

# -- words and codes -------------------------------------------------------------------------------------


def test_the_words_can_be_told_apart_and_are_as_many_as_the_docs_say() -> None:
    assert len(WORDS) == len(set(WORDS)) == 512
    assert all(word.isascii() and word.islower() and 3 <= len(word) <= 7 for word in WORDS)
    slips = [word[:at] + gap + word[at + 1 :] for word in WORDS for at in range(len(word)) for gap in ("?", "")]
    with_gap = [slip for slip in slips if "?" in slip]
    assert len(with_gap) == len(set(with_gap)), "one other letter makes one word of another"
    assert not set(slips) & set(WORDS), "one missing letter does"


@pytest.mark.parametrize("text", [CODE, " 12 Maple otter\n", "12 - maple - OTTER", "12-maple-otter"])
def test_a_code_may_be_typed_in_several_ways(text: str) -> None:
    assert parse_code(text) == CODE
    assert run_of(CODE) == 12


@pytest.mark.parametrize("text", ["", "12", "maple-otter", TOKEN, f"potluck join {TOKEN}", "12-maple-otter-owl"])
def test_what_is_no_code(text: str) -> None:
    assert parse_code(text) is None


def test_a_slip_is_found_before_it_costs_a_try() -> None:
    with pytest.raises(TokenError, match="mapel is not a word") as slip:
        parse_code("12-mapel-otter")
    assert slip.value.hint == "did you mean maple?"


def test_wrong_tries_use_up_codes_and_right_ones_do_not() -> None:
    codes = Codes(12)
    seen = [codes.current]
    for number in range(1, TRIES * CODES):
        codes.wrong()
        if number % TRIES == 0:
            seen.append(codes.current)
        assert codes.current == seen[-1] is not None
    assert len(set(seen)) == CODES
    assert all(code is not None and parse_code(code) == code and run_of(code) == 12 for code in seen)
    codes.wrong()
    assert codes.current is None
    codes.wrong()
    assert codes.current is None


def test_codes_are_drawn_from_all_words() -> None:
    drawn = {word for _ in range(4000) for word in (Codes(10).current or "").split("-")[1:]}
    assert drawn == set(WORDS)


# -- the exchange ----------------------------------------------------------------------------------------


def test_the_same_code_gives_the_token_and_another_nothing() -> None:
    assert exchange(CODE, CODE)[0] == TOKEN
    token, seen = exchange(CODE, "12-maple-owl")
    assert token is None
    assert seen[3] == b""


def test_a_host_that_does_not_know_the_code_is_not_believed() -> None:
    """It answers RIGHT to whatever it is told, with a proof and a token of its own."""
    host, guest = HostSide("12-maple-owl", "potluck3-evil"), GuestSide(CODE)
    greeting = guest.greeting()
    guest.proof(host.reply(greeting)[1:])
    keys = codes_of._finish(host._side, greeting[len(GREETING) :])
    with pytest.raises(WrongCode):
        guest.token(keys.host_proof, keys.cipher.encrypt(keys.nonce, b"potluck3-evil", None))


def test_a_token_that_was_changed_on_its_way_is_not_believed() -> None:
    host, guest = HostSide(CODE, TOKEN), GuestSide(CODE)
    answer = host.answer(guest.proof(host.reply(guest.greeting())[1:]))
    assert answer is not None
    for at in (0, len(answer) - 40, -1):
        sealed = bytearray(answer[35:])
        sealed[at] ^= 1
        with pytest.raises(WrongCode):
            guest.token(answer[1:33], bytes(sealed))


def test_a_proof_counts_once_and_an_echo_is_none() -> None:
    host, guest = HostSide(CODE, TOKEN), GuestSide(CODE)
    reply = host.reply(guest.greeting())
    proof = guest.proof(reply[1:])
    assert host.answer(bytes(32)) is None
    assert host.answer(proof) is None  # the exchange is over
    # A recorded proof is worthless in another exchange.
    again = HostSide(CODE, TOKEN)
    again.reply(GuestSide(CODE).greeting())
    assert again.answer(proof) is None
    # What the host says cannot be sent back to it.
    echoed = HostSide(CODE, TOKEN)
    reply = echoed.reply(GREETING + b"B" + reply[2:])
    with pytest.raises(WireError):
        echoed.answer(proof)


BAD_ELEMENTS = (
    bytes(33),
    b"A" + bytes(32),
    b"A" + b"\xff" * 32,
    b"A" + Zero.to_bytes(),
    b"S" + Base.to_bytes(),
    b"A" + (2**255 - 19 + 1).to_bytes(32, "little"),
    b"A" + b"\xec" + b"\xff" * 30 + b"\x7f",  # of order 2
    b"",
    b"A",
)


@pytest.mark.parametrize("element", BAD_ELEMENTS, ids=range(len(BAD_ELEMENTS)))
def test_hostile_elements_give_nobody_a_token(element: bytes) -> None:
    for proof in (Zero.to_bytes(), element[1:], bytes(32)):
        host = HostSide(CODE, TOKEN)
        host.reply(GREETING + element)
        with contextlib.suppress(WireError):
            assert host.answer(proof) is None


def test_random_bytes_are_refused_without_another_exception() -> None:
    chance = random.Random(7)
    for _ in range(20):
        host = HostSide(CODE, TOKEN)
        host.reply(GREETING + b"A" + chance.randbytes(32))
        with contextlib.suppress(WireError):
            assert host.answer(chance.randbytes(32)) is None
        with contextlib.suppress(WireError):
            guest = GuestSide(CODE)
            guest.greeting()
            guest.proof(b"B" + chance.randbytes(32))


def test_nothing_that_travels_depends_on_the_code_alone() -> None:
    """The same code again: every value is another one, so none can be searched for by the code alone."""
    first, second = exchange(CODE, CODE)[1], exchange(CODE, CODE)[1]
    assert not {message[len(GREETING) :] for message in first} & {message[len(GREETING) :] for message in second}
    for one, other in zip(first, second):
        body, again = one.removeprefix(GREETING), other.removeprefix(GREETING)
        same = [at for at, (a, b) in enumerate(zip(body, again)) if a == b]
        # The marks and the length, and chance: 1 in 256 bytes.
        assert len(same) <= 4 + len(body) // 25


# -- over sockets ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(codes: Codes) -> Iterator[tuple[int, list[tuple[str, bool]]]]:
    tried: list[tuple[str, bool]] = []
    server = CodeServer("127.0.0.1", 0, lambda address, right: tried.append((address, right)))
    try:
        server.start(codes, TOKEN)
        yield server.port, tried
    finally:
        server.close()


def other_than(code: str) -> str:
    return f"12-{next(word for word in WORDS if word not in code)}-yak"


def test_several_guests_use_one_code_and_wrong_ones_use_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_of, "PAUSE_S", 0.0)
    codes = Codes(12)
    with served(codes) as (port, tried):
        for _ in range(2):
            assert codes.current is not None
            assert redeem("127.0.0.1", port, codes.current) == TOKEN
        first = codes.current
        for number in range(TRIES * CODES):
            assert codes.current is not None
            with pytest.raises(WrongCode):
                redeem("127.0.0.1", port, other_than(codes.current))
            assert (codes.current == first) == (number + 1 < TRIES)
        with pytest.raises(TokenError, match="no longer accepts codes"):
            redeem("127.0.0.1", port, first)
    assert tried == [("127.0.0.1", True)] * 2 + [("127.0.0.1", False)] * TRIES * CODES


def test_strangers_who_leave_say_nonsense_or_keep_silent_cost_no_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_of, "EXCHANGE_S", 0.3)
    monkeypatch.setattr(codes_of, "PAUSE_S", 0.0)
    codes = Codes(12)
    code = codes.current
    assert code is not None
    with served(codes) as (port, tried):
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100_000), GREETING + b"A" + b"\xff" * 32):
            with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
                stranger.sendall(words)
        with socket.create_connection(("127.0.0.1", port)) as leaves:
            leaves.sendall(GuestSide(code).greeting())
            assert leaves.recv(1) == READY
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(GREETING[:3])
            began = time.monotonic()
            assert redeem("127.0.0.1", port, code) == TOKEN
            assert time.monotonic() - began < 20
    assert tried == [("127.0.0.1", True)]
    assert codes.current == code
    assert codes.tries == TRIES


def test_how_long_the_host_computes_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the code. A greeting, which a stranger may send without end, is answered at once."""
    computed: list[str] = []
    finish = codes_of._finish

    def slow(side: object, element: bytes) -> object:
        computed.append("finish")
        return finish(side, element)

    monkeypatch.setattr(codes_of, "_finish", slow)
    codes = Codes(12)
    assert codes.current is not None
    with served(codes) as (port, tried):
        stranger = GuestSide(other_than(codes.current))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            began = time.monotonic()
            connection.sendall(stranger.greeting())
            element = connection.recv(34)[1:]
            assert len(element) == 33
            assert not computed
            connection.sendall(finish(stranger._side, element).guest_proof)
            assert connection.recv(1) == b"w"
            assert time.monotonic() - began >= codes_of.PAUSE_S
    assert computed == ["finish"]
    assert codes.tries == TRIES - 1
    assert tried == [("127.0.0.1", False)]


def test_no_two_exchanges_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many guesses could be under way before the first wrong one is counted."""
    monkeypatch.setattr(codes_of, "PAUSE_S", 0.0)
    codes = Codes(12)
    code = codes.current
    assert code is not None
    with served(codes) as (port, tried):
        with socket.create_connection(("127.0.0.1", port)) as first:
            first.sendall(GuestSide(code).greeting())
            assert first.recv(1) == READY
            with socket.create_connection(("127.0.0.1", port)) as second:
                second.sendall(GuestSide(code).greeting())
                second.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    second.recv(1)
        assert redeem("127.0.0.1", port, code) == TOKEN
    assert tried == [("127.0.0.1", True)]


def test_closing_does_not_wait_for_a_silent_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_of, "EXCHANGE_S", 60.0)
    codes = Codes(12)
    assert codes.current is not None
    with served(codes) as (port, _):
        silent = socket.create_connection(("127.0.0.1", port))
        silent.sendall(GuestSide(codes.current).greeting())
        assert silent.recv(1) == READY
        began = time.monotonic()
    assert time.monotonic() - began < 30
    silent.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "potluck-code"]


def test_there_is_no_port_after_the_last_one() -> None:
    with pytest.raises(NetworkError, match="port 65536") as failure:
        CodeServer("127.0.0.1", 65536, lambda address, right: None)
    assert "choose another" in failure.value.hint


def test_a_port_that_is_taken_and_one_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port}"):
            CodeServer("127.0.0.1", port, lambda address, right: None)

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(NetworkError, match="did not send the token"):
            redeem("127.0.0.1", port, CODE)
        thread.join()


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "spake2" else object())
    with pytest.raises(MissingModuleError, match="--lan needs spake2") as missing:
        need_libraries("--lan")
    assert missing.value.hint == "pip install -e '.[lan]'"
    need_libraries("--qr", "segno")
