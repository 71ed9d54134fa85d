"""`potluck up` with the host on a node of a Ray cluster: an actor there starts all of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.errors import ConfigError

if TYPE_CHECKING:
    from potluck.fleet.cluster import FleetRun

INTERRUPTED = 130


def host_of(address: str, name: str) -> dict[str, str]:
    """The label selector for the node that hosts: LABEL=VALUE, or a node's name."""
    from potluck.fleet.ray import RayFleet

    label, is_label, value = name.partition("=")
    if is_label:
        return {label: value}
    nodes = RayFleet(address).nodes()
    if name not in nodes:
        raise ConfigError(f"the Ray cluster has no node {name!r}", hint=f"its nodes are: {', '.join(nodes)}")
    return {"ray.io/node-id": str(nodes[name]["NodeID"])}


def start_there(
    address: str, host: str, after: Sequence[str], words: Sequence[str], *, runs: Path | None, send: Sequence[Path]
) -> FleetRun:
    """Start the run; `host` as for `host_of`, `words`: options of `potluck host`, `runs`: a folder of that node."""
    from potluck.fleet.ray import RayCluster

    cluster = RayCluster(host={"label_selector": host_of(address, host)}, address=address)
    there = runs or Path("~/potluck", Path.cwd().name, "runs")
    name = [] if "=" in host else ["--name", host]
    return cluster.start(after[0], after[1:], options=[*name, *words], runs=there, send=send)


class ThereRun:
    """A run whose host is elsewhere, shown here; `interrupt` from a signal handler or any thread."""

    def __init__(self, run: FleetRun) -> None:
        self._run, self._interrupts = run, 0

    def interrupt(self) -> None:
        """The first time: the host saves and ends. The second: this process ends, and with it Ray ends the rest."""
        self._interrupts += 1
        if self._interrupts > 1:
            os._exit(INTERRUPTED)
        threading.Thread(target=self._run.stop, name="potluck-stop", daemon=True).start()

    def show(self) -> int:
        """Show the host's output until the run has ended; its exit status."""
        ended = self._run.follow(sys.stdout.buffer)
        if ended.why:
            click.echo(f"\nthe run failed: {ended.why}", err=True)
        if ended.folder:
            click.echo(f"run folder, on the node that hosted: {ended.folder}", err=True)
        return ended.status or 0
