"""What ranks do in the tests of settings and of what is logged: each returns the words of its logger.

It knows the backend's interface and the logger's name.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from support.dist_faults import Told, begin, told_by


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelname, record.getMessage()))


def logged(rank: int, world: int, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """What a group and one collective say at a level: (level, words)."""
    logger, kept = logging.getLogger("potluck.dist"), _Kept()
    logger.addHandler(kept)
    try:
        begin("tcp", **settings)
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            logger.error("something went wrong")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        logger.removeHandler(kept)
    return kept.said


def second_group(rank: int, world: int, first: bool, second: bool | None) -> tuple[Told, str]:
    """A group after another one: what it is told, and how it says that it is connected."""
    from potluck.dist import Config

    begin("tcp", encryption=first)
    groups: list[Any] = []
    try:
        options = None if second is None else Config(transport="tcp", encryption=second)
        told = told_by(lambda: groups.append(dist.new_group([0, 1], pg_options=options)))
        return told, repr(groups[0]) if groups else ""
    finally:
        dist.destroy_process_group()
