"""Tokens encrypted for one worker of a cluster engine, so that the engine's logs, state and dashboard show no
secret.

The worker makes a key pair and publishes the public key. The driver encrypts the token for that key: X25519 with a
new key for each token, HKDF, ChaCha20-Poly1305. Only the worker's memory has the secret key.
"""

from __future__ import annotations

import importlib.util

from potluck.errors import MissingModuleError, TokenError

KEY_BYTES = 32
_INFO = b"potluck sealed token 1"


def need_library(extra: str) -> None:
    """Raises MissingModuleError if this machine cannot encrypt tokens; `extra` is the extra that installs the
    library."""
    if importlib.util.find_spec("cryptography") is None:
        raise MissingModuleError(
            "encrypting a token needs cryptography, which is not installed", hint=f"pip install -e '.[{extra}]'"
        )


def seal(token: str, public: bytes) -> bytes:
    """The token, readable only by the `KeyPair` whose public key this is."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    mine = X25519PrivateKey.generate()
    shared = mine.exchange(X25519PublicKey.from_public_bytes(public))
    sender: bytes = mine.public_key().public_bytes_raw()
    return sender + _crypt(shared, sender, public, token.encode(), encrypt=True)


class KeyPair:
    """The key pair of one worker. It is never pickled: the secret key stays in this process."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._secret = X25519PrivateKey.generate()
        self.public: bytes = self._secret.public_key().public_bytes_raw()

    def __getstate__(self) -> object:
        raise TypeError("a key pair cannot be sent to another process")

    def open(self, sealed: bytes) -> str:
        """The decrypted token. Raises TokenError if it was not encrypted for this key."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        sender, rest = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
        try:
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(sender))
            return _crypt(shared, sender, self.public, rest, encrypt=False).decode()
        except (InvalidTag, ValueError):
            raise TokenError(
                "the token was encrypted for another process",
                hint="the worker was restarted: start the guest again",
            ) from None


def _crypt(shared: bytes, sender: bytes, receiver: bytes, text: bytes, *, encrypt: bool) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=_INFO + sender + receiver).derive(shared)
    cipher, nonce = ChaCha20Poly1305(key), bytes(12)  # each key encrypts one text
    made: bytes = cipher.encrypt(nonce, text, None) if encrypt else cipher.decrypt(nonce, text, None)
    return made
