"""Ranks on this machine: one command, started once for each rank as torchrun would, that never outlives this
process.

Owns their start and their end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

from potluck.errors import RankGoneError, ScriptError
from potluck.fleet.life import GRACE_S, leased, reader_is_gone

OWN_END_S = 1.0
"""How long a rank waits after it finds another one gone: usually the process that started both ends it and reports
the cause."""
_POLL_S = 0.05
_PATIENCE_S = 3.0


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, by torchrun or by us."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def rank_leased(parent: int | None) -> Iterator[None]:
    """The life of a rank: `parent`, if it was started by us, ends all ranks at once when nobody reads their output.

    One that ended before would be a failure to the others.
    """
    with leased(parent, reader=parent is None):
        try:
            yield
        except BrokenPipeError:
            if parent is not None and reader_is_gone():
                time.sleep(GRACE_S)
            raise
        except RankGoneError:
            if parent is not None:
                time.sleep(OWN_END_S)
            raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(rank: int, world: int, address: str, port: int) -> dict[str, str]:
    """The variables that tell torch.distributed its rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def run_ranks(command: Sequence[str], world: int, *, threads: int) -> None:
    """Run `command` as `world` ranks. Rank 0 writes to our standard output, all of them to standard error.

    Ctrl-C ends all of them.

    Raises:
        ScriptError: names the first rank that failed and its status; the others are ended.
        BrokenPipeError: nobody reads our output, and the first rank failed because of that.
    """
    with leased():
        try:
            _run(command, world, threads)
        except ScriptError:
            if reader_is_gone():
                raise BrokenPipeError from None
            raise


def _run(command: Sequence[str], world: int, threads: int) -> None:
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            variables = {**os.environ, **rank_environment(rank, world, "127.0.0.1", port)}
            variables["OMP_NUM_THREADS"] = str(threads)
            processes.append(
                subprocess.Popen(
                    list(command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for us: we end them
                )
            )
        wait_for(processes)
    finally:
        end(processes)


def wait_for(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float | None = None) -> None:
    """Wait until all have ended well or one has failed."""
    began = time.monotonic()
    while True:
        statuses = [process.poll() for process in processes]
        failed = [(rank, status) for rank, status in enumerate(statuses) if status]
        if failed:
            rank, status = failed[0]
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise ScriptError(f"rank {rank} {how}", hint="its output is above")
        if None not in statuses:
            return
        if deadline_s is not None and time.monotonic() - began > deadline_s:
            raise ScriptError(f"the ranks had not ended after {deadline_s:g} s")
        time.sleep(_POLL_S)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run, with everything that they started: first with SIGTERM, then with SIGKILL."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.05, deadline - time.monotonic()))
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
