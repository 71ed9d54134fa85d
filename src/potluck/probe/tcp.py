"""Measures a plain TCP connection between two ranks, which find each other through a store."""

from __future__ import annotations

import socket
import time
from typing import Any

from potluck.wire.token import source_address

_PIECE = 1 << 18
_PATIENCE_S = 20.0


def bytes_per_s(store: Any, name: str, sends: bool, *, towards: str, seconds: float = 1.0) -> float:
    """Send for some seconds from one rank to another. Returns the received bytes per second, the same on both.

    `towards`: the address of the store's server. The receiver listens at the address from which it reaches it.
    """
    if sends:
        host, _, port = store.get(f"{name}/address").decode().rpartition(":")
        with socket.create_connection((host, int(port)), _PATIENCE_S) as link:
            _send_for(link, seconds)
        return float(store.get(f"{name}/rate").decode())
    with socket.create_server(("", 0)) as server:
        server.settimeout(_PATIENCE_S)
        store.set(f"{name}/address", f"{source_address(towards)}:{server.getsockname()[1]}")
        link, _ = server.accept()
        with link:
            rate = _take(link)
    store.set(f"{name}/rate", repr(rate))
    return rate


def _send_for(link: socket.socket, seconds: float) -> None:
    piece = bytes(_PIECE)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        link.sendall(piece)
    link.shutdown(socket.SHUT_WR)
    link.settimeout(_PATIENCE_S)
    link.recv(1)  # closed by the other side when all has arrived


def _take(link: socket.socket) -> float:
    """The time begins with the first bytes, which do not count."""
    link.settimeout(_PATIENCE_S)
    buffer = bytearray(4 * _PIECE)
    link.recv_into(buffer)
    began, arrived = time.monotonic(), 0
    while got := link.recv_into(buffer):
        arrived += got
    return arrived / max(time.monotonic() - began, 1e-9)
