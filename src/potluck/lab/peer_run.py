"""The common parts of all peer strategies' workers: orders, training, a board for notes, and the record of
steps."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from potluck.balance.ledger import EpochSteps
from potluck.bounds import Finite, Many, Natural, Text
from potluck.checked import build, decode
from potluck.device import pick
from potluck.errors import GuestsMissingError, HostGoneError, PotluckError
from potluck.lab.worker_spec import START_S, RankSpec, WorkerSpec, WorkerStep, read_spec
from potluck.train import recipes
from potluck.train.data import Loader, epoch_order, to_device

HOST_RANK = 0
STEP_LIMIT_S = 600.0
"""No step and no exchange may take longer."""
LAST_REPORTS_S = 15.0
"""Time that the host waits at the end for the others' reports of the last steps."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A worker's orders: the common spec, and which of its machines this is."""

    spec: WorkerSpec
    rank: int

    @property
    def me(self) -> RankSpec:
        return self.spec.members[self.rank]

    @property
    def address(self) -> str:
        return self.me.address

    @property
    def is_host(self) -> bool:
        return self.rank == HOST_RANK

    @property
    def world(self) -> int:
        return len(self.spec.members)

    @property
    def global_batch(self) -> int:
        return sum(member.share for member in self.spec.members)

    def positions(self, step: int, first: int, count: int) -> list[int]:
        """`count` positions of a step (counted from 0), from this rank's `first` on; after the last, the first.

        A rank's own share comes first, so that ranks which keep to their shares compute every sample once.
        """
        start = sum(member.share for member in self.spec.members[: self.rank]) + first
        return [step * self.global_batch + (start + i) % self.global_batch for i in range(count)]


def read_orders(path: Path, rank: int) -> Orders:
    """The orders of one rank from the spec file that the lab has written."""
    return Orders(spec=read_spec(path), rank=rank)


class PeerTraining:
    """The recipe on this machine: its model, optimizer and samples, and gradients at its device's speed."""

    def __init__(self, orders: Orders) -> None:
        spec = orders.spec
        self.recipe = recipes.get(spec.recipe.name)
        self.config = build(self.recipe.Config, spec.recipe.config)
        self.device = pick(orders.me.device, threads=spec.threads)
        self.model: nn.Module = self.recipe.model(self.config).to(self.device.torch_device)
        self.device.attach(self.model)
        self.optimizer = self.recipe.optimizer(self.model, self.config)
        self.scheduler = self.recipe.scheduler(self.optimizer, self.config)
        self.optimizer.register_step_pre_hook(self._clip)
        self._loader = Loader(lambda: self.recipe.dataset(self.config), None)
        order = epoch_order(self._loader.samples, spec.seed)
        self._steps = EpochSteps(samples=self._loader.samples, global_batch=orders.global_batch, order=order)

    def compute(self, model: nn.Module, positions: Sequence[int], scale: float = 1.0) -> float:
        """Add the gradient of these samples' mean loss, times `scale`; their summed loss."""
        batch = to_device(self._loader.fetch(self._steps.samples_of(positions)), self.device)
        self.device.begin(len(positions))
        loss: Tensor = self.recipe.loss(model, batch, self.config)
        (loss * scale).backward()
        self.device.end()
        return loss.item() * len(positions)

    def save(self, path: Path) -> None:
        """Write the weights as safetensors."""
        save_file(self.model.state_dict(), path)

    def _clip(self, optimizer: torch.optim.Optimizer, *ignored: Any) -> None:
        if self.config.clip_norm:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.config.clip_norm)


class StepPart(Struct, frozen=True, kw_only=True):
    """One machine's part of one step."""

    samples: Natural
    loss_sum: Finite
    group: Many[Text]
    """The machines with which its gradient was averaged."""


Note = bool | str | list[str] | StepPart
N = TypeVar("N", bool, str, list[str], StepPart)


class Board:
    """A board for notes between machines, held by the host. It costs a few bytes per step on the link."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._store = TCPStore(
            orders.spec.master_address,
            orders.spec.master_port,
            is_master=orders.is_host,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_S),
        )

    def put(self, key: str, value: Note) -> None:
        try:
            self._store.set(key, msgspec.json.encode(value).decode())
        except RuntimeError as error:
            raise self._gone() from error

    def look(self, key: str, kind: type[N]) -> N | None:
        """The note if it is there."""
        try:
            return decode(self._store.get(key), kind) if self._store.check([key]) else None
        except RuntimeError as error:
            raise self._gone() from error

    def wait(self, key: str, kind: type[N], seconds: float, who: int) -> N:
        """The note of rank `who`, which must come within `seconds`."""
        deadline = time.monotonic() + seconds
        while (value := self.look(key, kind)) is None:
            if time.monotonic() > deadline:
                name = self._orders.spec.members[who].name
                raise GuestsMissingError(f"{name} did not reach {key} within {seconds:.0f} s", machine=name)
            time.sleep(POLL_S)
        return value

    def gather(self, name: str, value: N) -> list[N]:
        """Every rank's note under a name, once all have written it."""
        self.put(f"{name}/{self._orders.rank}", value)
        return [self.wait(f"{name}/{who}", type(value), START_S, who) for who in range(self._orders.world)]

    def leave(self) -> None:
        """Sign off. The host waits until all have, because the board ends with it."""
        self.put(f"goodbye/{self._orders.rank}", True)
        if self._orders.is_host:
            for who in range(self._orders.world):
                self.wait(f"goodbye/{who}", bool, STEP_LIMIT_S, who)

    def _gone(self) -> PotluckError:
        host = self._orders.spec.members[HOST_RANK].name
        return HostGoneError(f"{host} cannot be reached any more", machine=self._orders.me.name)


@dataclass(slots=True)
class StepRecord:
    """Records each machine's part of each step: guests report to the host, which writes a row once it has all
    reports."""

    orders: Orders
    board: Board
    _began_s: float = field(default_factory=time.monotonic)
    _waiting: list[tuple[int, float, float, StepPart]] = field(default_factory=list)

    def ended(self, step: int, part: StepPart) -> None:
        """Record that a step (counted from 1) has just ended, with this machine's part."""
        if not self.orders.is_host:
            self.board.put(f"step/{step}/{self.orders.rank}", part)
            return
        now = time.monotonic()
        self._waiting.append((step, now, now - self._began_s, part))
        self._began_s = now

    def flush(self, seconds: float = 0.0) -> None:
        """Write the complete rows. With a time limit, wait for the others, then leave out silent machines."""
        deadline = time.monotonic() + seconds
        while self._waiting:
            step, ended_at, step_s, own = self._waiting[0]
            others = {rank: self._part(step, rank) for rank in self._partners(own)}
            if None in others.values():
                if not seconds:
                    return
                if time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    continue
            known = {rank: part for rank, part in others.items() if part is not None}
            self._write(step, ended_at, step_s, {HOST_RANK: own} | known)
            del self._waiting[0]

    def _partners(self, own: StepPart) -> list[int]:
        members = enumerate(self.orders.spec.members)
        return [rank for rank, member in members if rank != HOST_RANK and member.name in own.group]

    def _part(self, step: int, rank: int) -> StepPart | None:
        return self.board.look(f"step/{step}/{rank}", StepPart)

    def _write(self, step: int, ended_at: float, step_s: float, parts: dict[int, StepPart]) -> None:
        members = self.orders.spec.members
        # Who was averaged without the host gave nothing to the weights that the host has now.
        counted = {
            rank: part for rank, part in parts.items() if rank == HOST_RANK or members[HOST_RANK].name in part.group
        }
        samples = {members[rank].name: part.samples for rank, part in counted.items()}
        loss = sum(part.loss_sum for part in counted.values()) / max(1, sum(samples.values()))
        made = WorkerStep(step=step, ended_at=ended_at, step_s=step_s, loss=loss, samples=samples)
        with open(self.orders.spec.out, "ab") as file:
            made.append_to(file)


def main(work: Callable[[Orders], None]) -> int:
    """A worker's command line, `--spec FILE --rank R`. Prints failures and returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True, help="a JSON file that the bench has written")
    parser.add_argument("--rank", type=int, required=True, help="which of its machines this is, from 0")
    options = parser.parse_args()
    try:
        work(read_orders(options.spec, options.rank))
    except PotluckError as error:
        print(f"error: {error}" + (f" (hint: {error.hint})" if error.hint else ""), file=sys.stderr, flush=True)
        return 1
    except ImportError as error:
        print(f"error: {error} (hint: install the extra peers)", file=sys.stderr, flush=True)
        return 1
    return 0
