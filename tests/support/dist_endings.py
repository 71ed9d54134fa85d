"""What ranks do in the tests of the end of a group: they send, and end at once.

It knows the backend's interface alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.dist_faults import Told, begin, told_by

LARGE = 4 << 20
"""Numbers of 4 bytes: 16 MiB."""


def payload(count: int, turn: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) + turn


def send_and_end(rank: int, world: int, transport: str, count: int, turns: int, how: str) -> list[str]:
    """Rank 0 sends to all others and ends its group at once; they read a little later. What they found wrong."""
    from potluck.dist import Config

    wrong = []
    for turn in range(turns):
        dist.init_process_group(
            "potluck",
            # A store of its own for every turn, which nobody's end takes away.
            init_method=f"file://{os.environ['STORE']}-{turn}",
            rank=rank,
            world_size=world,
            pg_options=Config(transport=transport),
            timeout=timedelta(seconds=30),
        )
        try:
            if rank == 0:
                works = [_say(payload(count, turn), other, how) for other in range(1, world)]
                del works
            else:
                # Not before the sender has ended, most of the time: what it left behind must do.
                time.sleep(0.05 if turn % 2 else 0.0)
                found = torch.full((count,), -1, dtype=torch.int32)
                error, text, _ = told_by(lambda to=found: _hear(to, how))  # type: ignore[misc]
                if error:
                    wrong.append(f"turn {turn}: {error}: {text}")
                elif not torch.equal(found, payload(count, turn)):
                    wrong.append(f"turn {turn}: other numbers came")
        finally:
            dist.destroy_process_group()
    return wrong


def once_more(rank: int, world: int, transport: str) -> list[float]:
    """Groups after groups, with one store that lives through all of them, as it does under torchrun."""
    from potluck.dist import Config

    store = dist.FileStore(os.environ["STORE"], world)
    sums = []
    for turn in range(3):
        options = Config(transport=transport)
        dist.init_process_group("potluck", store=store, rank=rank, world_size=world, pg_options=options)
        try:
            members = [turn % world, (turn + 1) % world]  # torch calls it the same in every turn
            group = dist.new_group(members, timeout=timedelta(seconds=20))
            part: Any = dist.group.WORLD
            parts = [part.split_group(sorted(members)), group if rank in members else None]
            for made in (None, *(made for made in parts if made is not None)):
                tensor = torch.tensor([float(rank + turn)])
                dist.all_reduce(tensor, group=made)
                sums.append(tensor.item())
        finally:
            dist.destroy_process_group()
    return sums


def _say(tensor: torch.Tensor, to: int, how: str) -> Any:
    if how == "broadcast":
        return dist.broadcast(tensor, 0) if to == 1 else None
    return dist.isend(tensor, to) if how == "isend" else dist.send(tensor, to)


def _hear(into: torch.Tensor, how: str) -> None:
    if how == "broadcast":
        dist.broadcast(into, 0)
    else:
        dist.recv(into, 0)


def end_beside(rank: int, world: int, transport: str, how: str) -> Told:
    """Rank 0 sends to the last rank, which is then dead or never reads, and ends: how long that takes."""
    begin(transport)
    dist.barrier()
    last = world - 1
    if rank == last and how == "dead":
        time.sleep(0.5)  # what it said in the barrier has left
        os._exit(1)
    if rank == last and how == "silent":
        time.sleep(1.0)
    if rank == 0:
        time.sleep(1.0 if how == "dead" else 0.0)
        dist.send(payload(LARGE, 0), last)
    return told_by(dist.destroy_process_group)


def leave_quietly(rank: int, world: int, transport: str, count: int) -> bool:
    """Rank 0 sends and its script ends, without a word; the other reads."""
    begin(transport)
    if rank == 0:
        dist.send(payload(count, 3), 1)
        return True
    time.sleep(0.5)
    found = torch.empty(count, dtype=torch.int32)
    dist.recv(found, 0)
    good = torch.equal(found, payload(count, 3))
    dist.destroy_process_group()
    return good


def restarted(folder: str) -> None:
    """Under torchrun: the last rank dies once, between two collectives."""
    again = os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group("potluck", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in range(2):
        if turn and rank == world - 1 and again == "0":
            os._exit(7)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
    Path(folder, str(rank)).write_text(f"try {again}: {tensor.item()}", encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """As a script of its own, whose end is the interpreter's."""
    import sys

    import potluck

    assert potluck.__version__
    if sys.argv[1] == "restarted":
        return restarted(sys.argv[2])
    transport, count, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rank = int(os.environ["RANK"])
    if how == "forked" and rank == 0:
        child = multiprocessing.get_context("fork").Process(target=leave_quietly, args=(0, 2, transport, count))
        child.start()
        child.join(40)
        raise SystemExit(child.exitcode)
    if not leave_quietly(rank, 2, transport, count):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
