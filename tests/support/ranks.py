"""A pool of processes that stand for ranks: started once, used by many tests, each call bounded in time.

It knows nothing of what they run: a call names a function, `module:name`, which each process imports itself.
The processes come from a server that has imported torch already, so that each costs a fork, not an import.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Self

from potluck.fleet.ranks import free_port
from support import forks
from support.processes import _environment

PRELOADED = ["torch", "torch.distributed.fsdp", "torch._dynamo", "numpy", "zmq", "psutil"]
"""DDP imports torch._dynamo when it is first used: once here instead of once in every rank."""
END_S = 5.0
SOURCE = Path(__file__).resolve().parents[2] / "src"
TESTS = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "support.ranks"]


class RankFailure(AssertionError):
    """A rank raised, died or did not answer; the message says which, and what it said."""


class Rank:
    """One process of the pool, spawned; on Linux, see ForkedRank."""

    pipe: Connection

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Wait for its end, which its closed pipe has told it, or kill it."""
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


class ForkedRank(Rank):
    """From the server that also forks hosts and guests; what it says goes where the tests' own words go."""

    def __init__(self, env: Mapping[str, str]) -> None:
        # In a folder of its own: multiprocessing's stays until Python's exit, and for good if that is not reached.
        with tempfile.TemporaryDirectory(prefix="rank-") as folder, Listener(f"{folder}/socket") as listener:
            words = (Path(f"/proc/{os.getpid()}/fd/{number}") for number in (1, 2))
            self._forked = forks.fork(
                [*COMMAND, str(listener.address)], cwd=Path.cwd(), env=env, out=next(words), err=next(words)
            )
            self.pipe = listener.accept()

    def kill(self) -> None:
        self._forked.send_signal(signal.SIGKILL)

    def end(self) -> None:
        try:
            self._forked.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._forked.wait(END_S)


class Ranks:
    """Up to `most` processes. A test in which one dies, or is changed for good, uses some of its own."""

    def __init__(self, most: int, *, fork: bool = True) -> None:
        """
        Args:
            fork: from the server; False: each imports torch itself, for CUDA, which does not survive a fork.
        """
        env = _environment({"PYTHONPATH": os.pathsep.join((str(SOURCE), str(TESTS)))})
        if fork and forks.can_be_forked(COMMAND, env):
            self._ranks: list[Rank] = [ForkedRank(env) for _ in range(most)]
            return
        context: Any = multiprocessing.get_context("forkserver" if fork and os.name == "posix" else "spawn")
        if fork and os.name == "posix":
            context.set_forkserver_preload(PRELOADED)
        self._ranks = [Rank(context) for _ in range(most)]

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
                    self._ranks[rank].kill()
        for rank in pipes.values():
            answers[rank] = (False, f"no answer within {deadline_s:g} s")
            self._ranks[rank].kill()
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.end()


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


if __name__ == "__main__":
    with Client(sys.argv[1]) as own:
        _serve(own, list(sys.path))
    os._exit(0)
