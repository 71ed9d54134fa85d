"""Settings of the backend for tests that open its sockets themselves."""

from __future__ import annotations

from potluck.dist.config import ConfigContext, LocalAddress, Resolved, resolve


def loopback() -> Resolved:
    """The defaults, at this machine's own address."""
    address = LocalAddress(name="lo", address="127.0.0.1", loopback=True)
    return resolve(None, {}, ConfigContext(rank=0, world=1, interfaces=(address,)))
