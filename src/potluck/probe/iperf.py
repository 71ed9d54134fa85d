"""Runs iperf3, if both machines have it, as a second measurement of the bare link."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import time

import msgspec

from potluck import checked
from potluck.bounds import Above0
from potluck.spec.probed import Rate

PROGRAM = "iperf3"
START_S = 2.0
_MOST_TEXT = 4 << 20


class _IperfRate(msgspec.Struct, frozen=True):
    bits_per_second: Above0


class _IperfEnd(msgspec.Struct, frozen=True):
    sum_received: _IperfRate


class _IperfReport(msgspec.Struct, frozen=True):
    """The part of iperf3's JSON that is read."""

    end: _IperfEnd


def installed() -> bool:
    return shutil.which(PROGRAM) is not None


class Server:
    """One iperf3 that serves one test and ends, or is ended."""

    def __init__(self, bind: str, seconds: float) -> None:
        """Raises OSError if it cannot be started."""
        with socket.create_server((bind, 0)) as free:
            self.port: int = free.getsockname()[1]
        self._end = time.monotonic() + seconds
        self._process = subprocess.Popen(
            [PROGRAM, "--server", "--one-off", "--bind", bind, "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=os.name == "posix",
        )

    @property
    def over(self) -> bool:
        return self._process.poll() is not None or time.monotonic() > self._end

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)


def measure(address: str, port: int, *, reverse: bool, seconds: float) -> Rate | None:
    """One test against such a server; None if it failed."""
    whole = max(1, math.ceil(seconds))
    command = [PROGRAM, "--client", address, "--port", str(port), "--time", str(whole), "--json"]
    deadline = time.monotonic() + START_S
    while True:  # the server may need a moment to open its port
        try:
            done = subprocess.run(
                [*command, *(["--reverse"] if reverse else [])],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=whole + 5.0,
                start_new_session=os.name == "posix",
            )
        except (OSError, subprocess.SubprocessError):
            return None
        rate = rate_in(done.stdout[:_MOST_TEXT])
        if rate is not None or time.monotonic() > deadline:
            return rate
        time.sleep(0.1)


def rate_in(said: bytes) -> Rate | None:
    """The received rate, from iperf3's JSON."""
    try:
        return Rate(bytes_per_s=checked.decode(said, _IperfReport).end.sum_received.bits_per_second / 8)
    except (msgspec.MsgspecError, RecursionError):
        return None
