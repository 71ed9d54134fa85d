"""A device that queues its work, on the CPU: what it was given is done a moment later, one thing after the other.

It must not know what is trained. What `to_host_later` gives holds nothing before the mark that follows is passed.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from potluck.device import Mark
from potluck.device.cpu import CpuDevice
from potluck.device.pick import FACTORIES

NAME = "queued"


class LaterMark(Mark):
    """Passed at a moment; from then on the values are there, unless the device has failed by then."""

    def __init__(self, at: float, copies: list[tuple[Tensor, Tensor]], *, fails: bool) -> None:
        self._at, self._copies, self._fails = at, copies, fails

    def passed(self) -> bool:
        if time.monotonic() < self._at:
            return False
        if self._fails:
            raise RuntimeError("the device failed")
        for kept, value in self._copies:
            kept.copy_(value)
        return True

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))
        assert self.passed()


class Queueing(CpuDevice):
    """`seconds` from one mark to the next; `fails_at`: the number of the first mark that is never passed."""

    ahead = 1

    def __init__(self, seconds: float = 0.15, fails_at: int | None = None) -> None:
        super().__init__()
        self.seconds, self._fails_at = seconds, fails_at
        self._at, self._marks = 0.0, 0
        self._copies: list[tuple[Tensor, Tensor]] = []

    def mark(self) -> Mark:
        self._at = max(self._at, time.monotonic()) + self.seconds
        self._marks += 1
        copies, self._copies = self._copies, []
        return LaterMark(self._at, copies, fails=self._fails_at is not None and self._marks >= self._fails_at)

    def to_host_later(self, tensor: Tensor) -> Tensor:
        kept = torch.full_like(tensor.detach(), float("nan"))
        self._copies.append((kept, tensor.detach().clone()))
        return kept


def install() -> None:
    """Make `--device queued` known."""
    FACTORIES[NAME] = lambda argument: Queueing()
