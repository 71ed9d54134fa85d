"""Encrypts a TCP connection between two ranks that share a secret (which they exchanged in an encrypted message):
owns its TLS.

Processors have instructions for AES and none for CURVE's cipher: a byte costs a third of the time. TLS needs
certificates or, from Python 3.13 on, a pre-shared key. Here the certificate is public and not checked. Instead each
rank proves that it knows the secret, by an HMAC of a value that is unique to this handshake (RFC 5929,
"tls-unique"). A man in the middle has one handshake with each of the two, and for neither the proof of the other's.

Both accept one elliptic curve and no other group. If a man in the middle could choose the group, he could give both
handshakes the same keys, and that proof would fail.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.resources
import socket
import ssl
import time

SECRET_BYTES = 32
RENEWED_BYTES = 1 << 37
"""After this many bytes a new connection gets new keys, well before AES-GCM's limit (2^24.5 records of 16 KiB)."""

_CIPHERS = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384"
_CURVE = "prime256v1"
_PROOF_BYTES = hashlib.sha256().digest_size
_SERVER, _CLIENT = b"potluck stream, who was called", b"potluck stream, who calls"


class NotSealedError(OSError):
    """The connection cannot be encrypted: OpenSSL lacks the curve or cipher, or the other end does not know the
    secret."""


def seal(connection: socket.socket, secret: bytes, *, server: bool, within_s: float) -> ssl.SSLSocket:
    """Encrypt a connection and authenticate its other end; `connection` must not be used any more.

    Raises:
        OSError: it failed or took too long. The connection is closed.
    """
    assert len(secret) == SECRET_BYTES
    until = time.monotonic() + within_s
    try:
        connection.settimeout(within_s)
        sealed = _context(server).wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:
        connection.close()
        raise NotSealedError("this OpenSSL lacks the curve or the cipher") from error
    try:
        sealed.do_handshake()
        unique = sealed.get_channel_binding("tls-unique")
        if not unique:
            raise NotSealedError("the handshake has no tls-unique")
        mine, theirs = (_SERVER, _CLIENT) if server else (_CLIENT, _SERVER)
        if not server:
            sealed.sendall(_proof(secret, mine, unique))
        if not hmac.compare_digest(first_bytes(sealed, _PROOF_BYTES, until), _proof(secret, theirs, unique)):
            raise NotSealedError("the other end does not know the secret")
        if server:
            sealed.sendall(_proof(secret, mine, unique))
    except OSError:
        sealed.close()
        raise
    return sealed


def _context(server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    if not server:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the proof authenticates, see above
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHERS)
    context.set_ecdh_curve(_CURVE)  # a client too: it offers and accepts no other
    if server:
        with importlib.resources.as_file(importlib.resources.files("potluck.dist") / "stream.pem") as path:
            context.load_cert_chain(path)
    return context


def _proof(secret: bytes, who: bytes, unique: bytes) -> bytes:
    return hmac.digest(secret, who + unique, "sha256")


def first_bytes(connection: socket.socket, count: int, until: float) -> bytes:
    """Read this many bytes, or those that arrive before `until`, however slowly they are sent."""
    got = b""
    while len(got) < count and (left_s := until - time.monotonic()) > 0:
        connection.settimeout(left_s)
        more = connection.recv(count - len(got))
        if not more:
            break
        got += more
    return got
