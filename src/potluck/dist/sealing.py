"""Owns how a bare connection between two ranks is encrypted: TLS, between two who already share a secret.

It must not know what travels, nor where the secret comes from (by the encrypted mail).

Processors have instructions for AES and none for CURVE's cipher: a byte costs a third of the time. TLS wants
certificates or, from Python 3.13 on, a pre-shared key; here the two have a secret instead. So the certificate is
one that everybody has and nobody checks, and each proves that it knows the secret by an HMAC of what is unique to
this very handshake (RFC 5929, "tls-unique"). Somebody in the middle has a handshake with each of the two, and for
neither a proof of the other's.

Both take one elliptic curve and no other group. A group of the other's choice could be one in which somebody in the
middle gives both handshakes the same keys, on which that proof rests.
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
"""After so many, well before AES-GCM wears out (2^24.5 records of 16 KiB), a new connection has new keys."""

_CIPHERS = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384"
_CURVE = "prime256v1"
_PROOF_BYTES = hashlib.sha256().digest_size
_SERVER, _CLIENT = b"potluck stream, who was called", b"potluck stream, who calls"


class NotSealedError(OSError):
    """There is no encrypted connection: this OpenSSL cannot, or the other does not know the secret."""


def seal(connection: socket.socket, secret: bytes, *, server: bool, within_s: float) -> ssl.SSLSocket:
    """The same connection, encrypted and with the other end known; `connection` must not be used any more.

    Raises:
        OSError: it could not be done in time. The connection is closed.
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
            raise NotSealedError("the handshake has nothing unique")
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
        context.verify_mode = ssl.CERT_NONE  # see above for who is let in
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHERS)
    context.set_ecdh_curve(_CURVE)  # of a client, too: it offers no other, and takes no other
    if server:
        with importlib.resources.as_file(importlib.resources.files("potluck.dist") / "stream.pem") as path:
            context.load_cert_chain(path)
    return context


def _proof(secret: bytes, who: bytes, unique: bytes) -> bytes:
    return hmac.digest(secret, who + unique, "sha256")


def first_bytes(connection: socket.socket, count: int, until: float) -> bytes:
    """So many, or what has come of them by then: who sends byte by byte has no longer than others."""
    got = b""
    while len(got) < count and (left_s := until - time.monotonic()) > 0:
        connection.settimeout(left_s)
        more = connection.recv(count - len(got))
        if not more:
            break
        got += more
    return got
