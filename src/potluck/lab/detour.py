"""Proxies on emulated machines, for which tokens are issued, so that links can have planned faults.

The kernel shapes the links; these proxies only inject faults.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from potluck.errors import TokenError
from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import Fault, LinkSpec
from potluck.spec.rig import Machine
from potluck.wire.token import Token, decode, encode

ADDRESS = "127.0.0.1"
PREFIX = "potluck-detour-"
WRITTEN_S = 2.0
"""Time for a host to finish writing its token file."""
HEADROOM = 1.25
"""A proxy accepts bytes at slightly more than its link's rate. Without a rate, it would buffer seconds of a slow
link's data, and a guest's data would seem delivered."""


class Detours:
    """One proxy on each guest that requested a token."""

    def __init__(self, entering: Callable[[str, Sequence[str]], list[str]]) -> None:
        """`entering` turns a command into one that runs on a machine."""
        self._entering = entering
        self._proxies: dict[str, ProxyProcess] = {}
        self._ports: dict[tuple[str, str, int], int] = {}
        self._exit = contextlib.ExitStack()
        self._folder: Path | None = None

    def token_file(self, machine: Machine, host_token: Path) -> Path:
        token = read_token(host_token)
        target = (token.addresses[0], token.port)
        proxy, folder = self._proxy(machine)
        if (machine.name, *target) not in self._ports:
            self._ports[(machine.name, *target)] = proxy.open(machine.name, target)
        through = replace(token, addresses=(ADDRESS,), port=self._ports[(machine.name, *target)])
        return write_token(folder / f"{token.port}.token", through)

    def add_faults(self, machine: Machine, faults: Sequence[Fault]) -> None:
        self._proxy(machine)[0].add_faults(machine.name, faults)

    def close(self) -> None:
        self._exit.close()

    def _proxy(self, machine: Machine) -> tuple[ProxyProcess, Path]:
        if self._folder is None:
            remove_leftovers(PREFIX)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
            self._exit.callback(shutil.rmtree, self._folder, ignore_errors=True)
        folder = self._folder / machine.name
        if machine.name not in self._proxies:
            folder.mkdir(exist_ok=True)
            rate = None if machine.link_mbit is None else HEADROOM * machine.link_mbit * 1e6 / 8
            proxy = ProxyProcess(
                [LinkSpec(name=machine.name, rate_bytes_per_s=rate)],
                folder=folder,
                wrap=lambda command: self._entering(machine.name, command),
            )
            self._proxies[machine.name] = self._exit.enter_context(proxy)
        return self._proxies[machine.name], folder


def remove_leftovers(prefix: str) -> None:
    """Remove temporary folders whose owner was killed: they hold tokens. Its id follows the prefix."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)  # others' folders, and links, stay as they are


def read_token(path: Path) -> Token:
    """A host's token, from a file that it may still be writing."""
    deadline = time.monotonic() + WRITTEN_S
    while True:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(
                f"cannot read the host's token from {path}: {error}", hint="is the host still starting?"
            ) from error
        if text.endswith("\n") or time.monotonic() > deadline:
            return decode(text)
        time.sleep(0.02)


def write_token(path: Path, token: Token) -> Path:
    """A file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(encode(token) + "\n")
    return path
