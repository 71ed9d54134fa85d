"""A pool of processes that stand for ranks: started once, used by many tests, each call bounded in time.

It knows nothing of what they run: a call names a function, `module:name`, which each process imports itself.
The processes come from a server that has imported torch already, so that each costs a fork, not an import.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

PRELOADED = ["torch", "torch.distributed.fsdp", "torch._dynamo", "numpy", "zmq", "psutil"]
"""DDP imports torch._dynamo when it is first used: once here instead of once in every rank."""
START_S = 60.0


class RankFailure(AssertionError):
    """A rank raised, died or did not answer; the message says which, and what it said."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rank:
    """One process of the pool."""

    def __init__(self, number: int, context: Any) -> None:
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
        self.process.start()
        theirs.close()


class Ranks:
    """Up to `most` processes. A test in which one dies, or is changed for good, uses some of its own."""

    def __init__(self, most: int, *, fork: bool = True) -> None:
        """
        Args:
            fork: from the server; False: each imports torch itself, for CUDA, which does not survive a fork.
        """
        self._context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            self._context.set_forkserver_preload(PRELOADED)
        self._ranks = [Rank(number, self._context) for number in range(most)]

    def call(
        self,
        function: str,
        world: int,
        *args: Any,
        deadline_s: float = 40.0,
        env: Mapping[str, str] | None = None,
        may_die: Sequence[int] = (),
    ) -> list[Any]:
        """function(rank, world, *args) on that many ranks; what each returned, None for one that died as told.

        Those that may die are killed when all others have answered.
        """
        port = free_port()
        for rank in range(world):
            variables = {
                **(env or {}),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
            }
            self._ranks[rank].pipe.send((function, (rank, world, *args), variables))
        answers = self._collect(world, deadline_s, set(may_die))
        wrong = [f"rank {rank}: {said}" for rank, (good, said) in sorted(answers.items()) if not good]
        if wrong:
            raise RankFailure("\n".join(wrong))
        return [answers[rank][1] for rank in range(world)]

    def _collect(self, world: int, deadline_s: float, may_die: set[int]) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        pipes: dict[Connection, int] = {self._ranks[rank].pipe: rank for rank in range(world)}
        end = time.monotonic() + deadline_s
        while pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(pipes), timeout=left):
                rank = pipes.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = (rank in may_die, None if rank in may_die else "died")
            if may_die.issuperset(pipes.values()):  # nobody waits for one that sleeps
                for rank in pipes.values():
                    self._ranks[rank].process.kill()
        for rank in pipes.values():
            answers[rank] = (False, f"no answer within {deadline_s:g} s")
            self._ranks[rank].process.kill()
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.process.join(5)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join(5)


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, variables = pipe.recv()
        except (EOFError, OSError):
            return
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            module, _, name = function.partition(":")
            answer = (True, getattr(importlib.import_module(module), name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
            _tear_down()
        os.environ.clear()
        os.environ.update(before)
        pipe.send(answer)


def _tear_down() -> None:
    """After a failure a group may still be there; the next call must not find it."""
    import torch.distributed as dist

    if dist.is_initialized():
        try:
            dist.group.WORLD.abort()  # type: ignore[union-attr]
            dist.destroy_process_group()
        except Exception:
            os._exit(1)


SOURCE = Path(__file__).resolve().parents[2] / "src"
