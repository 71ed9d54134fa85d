"""A short code that a guest exchanges for the token: SPAKE2 between the host and a guest that knows the code.

    guest → host    GREETING, the guest's SPAKE2 message
    host → guest    READY, the host's SPAKE2 message; or OFF
    guest → host    a proof that the guest has the same key, so knew the code
    host → guest    RIGHT, the host's proof, the token encrypted; or WRONG

A listener cannot search for the code: all data that is sent depends on secrets that both sides delete. A
participant can try one code in each exchange. So 18 bits are enough, because the host makes one exchange at a time
and counts wrong proofs: after `TRIES` wrong ones a code is replaced, and a run has `CODES` codes.

The guest proves itself first. A stranger that leaves before that has learned nothing, and it does not count as a
try.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hmac
import importlib.util
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from potluck.errors import MissingModuleError, NetworkError, PortTakenError, TokenError, WireError
from potluck.sinks import guarded
from potluck.wire.waker import Waker
from potluck.wire.words import WORDS

TRIES = 3
CODES = 3
EXCHANGE_S = 3.0
"""Time limit for all four messages; each side computes for about 10 ms."""
PAUSE_S = 0.5
"""An exchange without a correct proof takes at least this long, which hides how long the host computed, and limits
the cost of strangers to a fiftieth of a core."""
GUEST_S = 20.0
"""Time limit of a guest, which may have to wait for others."""
MAX_TOKEN_BYTES = 4096

GREETING = b"potluck code 1\n"
READY, RIGHT, WRONG, OFF = b"y", b"r", b"w", b"o"
_ELEMENT_BYTES = 33
_PROOF_BYTES = 32
_GUEST, _HOST = b"potluck guest", b"potluck host"
_SHAPE = re.compile(r"(\d{1,3})[\s-]+([a-z]+)[\s-]+([a-z]+)")


class WrongCode(Exception):
    """The other side does not know this code."""


def parse_code(text: str) -> str | None:
    """The code in the typed text, in the host's spelling; None if it is not a code but, for example, a token.

    Raises TokenError if it looks like a code, but cannot be one.
    """
    match = _SHAPE.fullmatch(text.strip().lower())
    if match is None:
        return None
    for word in match.groups()[1:]:
        if word not in WORDS:
            close = difflib.get_close_matches(word, WORDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "look at the host's terminal again"
            raise TokenError(f"{word} is not a word of any code", hint=hint)
    return "-".join(match.groups())


def run_of(code: str) -> int:
    """The number of the run that a code is for."""
    return int(code.partition("-")[0])


class Codes:
    """The codes of one run. Wrong tries use them up; correct ones do not."""

    def __init__(self, run: int, choose: Callable[[tuple[str, ...]], str] = secrets.choice) -> None:
        self._run, self._choose = run, choose
        self._left = CODES
        self.current: str | None = None
        """None: all are used up."""
        self.tries = 0
        """How many wrong tries are left for the current code."""
        self._renew()

    def wrong(self) -> None:
        self.tries -= 1
        if self.tries <= 0:
            self._renew()

    def _renew(self) -> None:
        if not self._left:
            self.current = None
            return
        self._left -= 1
        self.current = f"{self._run}-{self._choose(WORDS)}-{self._choose(WORDS)}"
        self.tries = TRIES


class _Keys:
    """The keys that both sides derive from SPAKE2's key."""

    def __init__(self, shared: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        made = HKDF(algorithm=SHA256(), length=96, salt=None, info=GREETING).derive(shared)
        # HMACs prove the key, not the cipher's tag: a text can be made whose tag fits many keys, so that one
        # exchange would try many codes.
        self.guest_proof = hmac.digest(made[:32], _GUEST, "sha256")
        self.host_proof = hmac.digest(made[32:64], _HOST, "sha256")
        self.cipher = ChaCha20Poly1305(made[64:])
        self.nonce = bytes(12)
        """Each key encrypts one text."""


class HostSide:
    """The host's part of one exchange, without I/O.

    Make it before a guest connects: the time for this depends on the code, the time of `reply` does not.
    """

    def __init__(self, code: str, token: str) -> None:
        from spake2 import SPAKE2_B

        self._side = SPAKE2_B(code.encode(), idA=_GUEST, idB=_HOST)
        self._token = token
        self._sent: bytes = self._side.start()
        self._element: bytes | None = None

    def reply(self, greeting: bytes) -> bytes:
        """The answer to the guest's first message. Raises WireError."""
        if not greeting.startswith(GREETING):
            raise WireError("this is not a guest that joins by a code")
        self._element = greeting[len(GREETING) :]
        return READY + self._sent

    def answer(self, proof: bytes) -> bytes | None:
        """The answer to the guest's proof, with the token; None if the proof is wrong. Raises WireError."""
        element, self._element = self._element, None
        if element is None:
            return None
        keys = _finish(self._side, element)
        if not hmac.compare_digest(proof, keys.guest_proof):
            return None
        sealed: bytes = keys.cipher.encrypt(keys.nonce, self._token.encode(), None)
        return RIGHT + keys.host_proof + struct.pack(">H", len(sealed)) + sealed


class GuestSide:
    """The guest's part of one exchange, without I/O."""

    def __init__(self, code: str) -> None:
        from spake2 import SPAKE2_A

        self._side = SPAKE2_A(code.encode(), idA=_GUEST, idB=_HOST)
        self._keys: _Keys | None = None

    def greeting(self) -> bytes:
        sent: bytes = self._side.start()
        return GREETING + sent

    def proof(self, element: bytes) -> bytes:
        """The proof of knowing the code, for the host that sent this message. Raises WireError."""
        self._keys = _finish(self._side, element)
        return self._keys.guest_proof

    def token(self, proof: bytes, sealed: bytes) -> str:
        """The token, after the host has proved that it also knows the code. Raises WrongCode."""
        from cryptography.exceptions import InvalidTag

        assert self._keys is not None
        if not hmac.compare_digest(proof, self._keys.host_proof):
            raise WrongCode
        try:
            opened: bytes = self._keys.cipher.decrypt(self._keys.nonce, sealed, None)
            return opened.decode("ascii")
        except (InvalidTag, UnicodeDecodeError):
            raise WrongCode from None


def _finish(side: Any, element: bytes) -> _Keys:
    try:
        return _Keys(side.finish(element))
    except Exception:  # the library has several, and asserts: none of them is ours
        raise WireError("this is not a SPAKE2 message") from None


class CodeServer:
    """Listens for guests that know the code, in a separate thread, one at a time."""

    def __init__(self, bind: str, port: int, on_try: Callable[[str, bool], None]) -> None:
        """`on_try` gets the address of each guest and whether its proof was correct."""
        self._on_try = guarded(on_try, "the report of a code")
        self._waker = Waker()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._guest: socket.socket | None = None
        try:
            self._listening = socket.create_server((bind, port), backlog=16)
        except (OSError, OverflowError) as error:  # OverflowError: there is no port after 65535
            self._waker.close()
            words = f"joining by a code needs port {port} at {bind}: {getattr(error, 'strerror', None) or error}"
            kind = PortTakenError if getattr(error, "errno", None) == errno.EADDRINUSE else NetworkError
            raise kind(words, hint="it is the one after --port; choose another, or start without --lan") from None
        self.port = int(self._listening.getsockname()[1])

    def start(self, codes: Codes, token: str) -> None:
        self._thread = threading.Thread(target=self._serve, args=(codes, token), name="potluck-code", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._waker.wake()
        if (guest := self._guest) is not None:
            with contextlib.suppress(OSError):
                guest.shutdown(socket.SHUT_RDWR)  # ends a wait for what it says
        if self._thread is not None:
            self._thread.join(EXCHANGE_S + 1)
        self._listening.close()
        self._waker.close()

    def _serve(self, codes: Codes, token: str) -> None:
        self._listening.setblocking(False)
        while not self._stop.is_set():
            side = HostSide(codes.current, token) if codes.current is not None else None
            select.select([self._listening, self._waker.inner], [], [])
            began = time.monotonic()
            done = False
            with contextlib.suppress(OSError, WireError):  # gone again, nonsense, or no file is left for it
                connection, address = self._listening.accept()
                with connection:
                    self._guest = connection
                    done = not self._stop.is_set() and self._exchange(connection, str(address[0]), side, codes)
            if not done:
                self._pause(began)

    def _pause(self, began: float) -> None:
        self._stop.wait(max(0.0, began + PAUSE_S - time.monotonic()))

    def _exchange(self, connection: socket.socket, address: str, side: HostSide | None, codes: Codes) -> bool:
        began = time.monotonic()
        deadline = began + EXCHANGE_S
        greeting = _receive(connection, len(GREETING) + _ELEMENT_BYTES, deadline)
        if side is None:
            connection.sendall(OFF)
            return False
        connection.sendall(side.reply(greeting))
        answer = side.answer(_receive(connection, _PROOF_BYTES, deadline))
        if answer is None:
            codes.wrong()  # before the guest can know
            self._pause(began)
        with contextlib.suppress(OSError):
            connection.sendall(answer or WRONG)
        self._on_try(address, answer is not None)
        return answer is not None


def redeem(address: str, port: int, code: str) -> str:
    """The token of the run that listens there.

    Raises WrongCode if the host does not know this code, or is not the host; TokenError if it no longer accepts
    codes; NetworkError if it cannot be reached, or uses another protocol.
    """
    deadline = time.monotonic() + GUEST_S
    try:
        with socket.create_connection((address, port), timeout=GUEST_S) as connection:
            side = GuestSide(code)
            connection.sendall(side.greeting())
            status = _receive(connection, 1, deadline)
            if status == READY:
                connection.sendall(side.proof(_receive(connection, _ELEMENT_BYTES, deadline)))
                status = _receive(connection, 1, deadline)
            if status == WRONG:
                raise WrongCode
            if status == OFF:
                raise TokenError(
                    "this run no longer accepts codes: too many were wrong",
                    hint="type the token that the host printed",
                )
            if status != RIGHT:
                raise WireError("an unknown answer")
            proof = _receive(connection, _PROOF_BYTES, deadline)
            (size,) = struct.unpack(">H", _receive(connection, 2, deadline))
            if size > MAX_TOKEN_BYTES:
                raise WireError("the token is too long")
            return side.token(proof, _receive(connection, size, deadline))
    except (OSError, WireError) as error:
        raise NetworkError(
            f"{address} port {port} did not send the token: {error}",
            hint="type the token that the host printed: potluck join TOKEN",
        ) from None


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(left_s)
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the connection was closed")
        found += more
    return found


def need_libraries(what: str, *names: str) -> None:
    """Raises MissingModuleError if one of these modules of the extra `lan` is not installed."""
    for name in names or ("zeroconf", "spake2", "cryptography"):
        if importlib.util.find_spec(name) is None:
            raise MissingModuleError(f"{what} needs {name}, which is not installed", hint="pip install -e '.[lan]'")
