"""Several GPUs in the host: makes one host of the processes that torchrun started on this machine.

Owns how these ranks find each other, what rank 0 tells the others, and the sum of their gradients. Rank 0's loop is
`host_loop`, the others' is `rank_loop`.

For a step, rank 0 (the host) sends STEP, then WORK for all ranks until all samples are computed, then UPDATE.
Orders and answers use gloo; gradients use NCCL if every rank has its own GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from potluck import checked
from potluck.bounds import Length, Natural, Text
from potluck.device import Mark
from potluck.errors import ConfigError, LoopError, RankGoneError
from potluck.train import gradient_sum

T = TypeVar("T")

STEP, WORK, LAND, UPDATE, END = range(1, 6)
"""Orders: a step begins; samples to compute; finish what was begun; the step is full; the training is over."""

PATIENCE_S = 1800.0
"""Rank 0 waits this long for another rank. A first micro-batch may have to be compiled."""
FOREVER = timedelta(days=30)
"""The others wait this long for rank 0, which may evaluate or wait for guests. They detect its end by the
connection."""
GOODBYE_S = 10.0
NOTICE_S = 1.0
"""A connection breaks a moment before the process at its other end counts as ended."""
LOOK_S = 0.5
GRACE_S = 20.0
"""Time from the end of torchrun to the forced end of a rank that ignores it."""
_TAG = 7
_HINT = "its last output is above; continue from the last checkpoint with --resume"


class RankReady(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank reports to rank 0 before the first step."""

    model: Text
    """Digest of the model's structure."""
    samples: Length | None
    free_bytes: Natural | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which of the host's ranks this process is."""

    rank: int
    world: int
    local_rank: int

    @property
    def leads(self) -> bool:
        """Rank 0 is the host: it has the run folder, the guests, the checkpoints and the output."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Order:
    """Rank 0's next order."""

    what: int
    number: int = 0
    """STEP: the step's. UPDATE: whether weights are compared afterwards."""
    samples: tuple[int, ...] = ()
    """WORK: the samples' indices. STEP: its epoch, and 1 if it is the epoch's last. UPDATE: how many it had."""


class RankDone(SystemExit):
    """The training is over: only rank 0 runs the rest of the script. Uncaught, it ends this process well."""


def place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """This process's place, from torchrun's variables; None if it is the host's only process."""
    given = os.environ if environ is None else environ
    try:
        world = int(given.get("WORLD_SIZE", "1"))
        if world <= 1 or "RANK" not in given or "LOCAL_RANK" not in given:
            return None
        rank, local_rank = int(given["RANK"]), int(given["LOCAL_RANK"])
        on_this_machine = int(given.get("LOCAL_WORLD_SIZE", world))
    except ValueError:
        raise ConfigError(
            "RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers", hint="let torchrun set them, or unset them"
        ) from None
    if on_this_machine != world:
        raise ConfigError(
            f"torchrun started {world} ranks on several machines, {on_this_machine} of them here",
            hint="a host is one machine: start torchrun there with --nnodes 1; the other machines join as guests",
        )
    return RankPlace(rank=rank, world=world, local_rank=local_rank)


def form(where: RankPlace, *, nccl: bool) -> Ranks:
    """Meet the other ranks. A process group that the script has made already is used and left alone."""
    ours = not dist.is_initialized()
    if ours:
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_S))
    if dist.get_world_size() != where.world or dist.get_rank() != where.rank:
        raise ConfigError(
            f"the process group has {dist.get_world_size()} ranks, torchrun started {where.world}",
            hint="let Potluck make the process group, or make one of all ranks",
        )
    control = dist.new_group(backend="gloo", timeout=FOREVER)
    sums = dist.group.WORLD if nccl and "nccl" in dist.get_backend_config() else control
    _end_with_parent()
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(where.world)]
    dist.all_gather(pids, torch.tensor([os.getpid()]), group=control)
    return Ranks(where, control=control, sums=sums, ours=ours, pids=[int(pid) for pid in pids])


def _end_with_parent() -> None:
    """End this rank when torchrun was killed, because torchrun then ends nobody."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="potluck-ranks", daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


class Ranks:
    """The host's ranks, from the view of one of them. Used by the training thread."""

    def __init__(self, where: RankPlace, *, control: Any, sums: Any, ours: bool, pids: Sequence[int] = ()) -> None:
        self.place = where
        self.world = where.world
        self._control, self._sums, self._ours = control, sums, ours
        self._others = range(1, where.world)
        self._pids = pids
        self._sending: deque[tuple[Any, Tensor]] = deque()
        self._ended = False

    # -- rank 0 -----------------------------------------------------------------------------------------

    def introduce(self, checkpoint: str | None) -> list[RankReady]:
        """Tell the others where the training begins. Returns each rank's report when it is ready."""
        for rank in self._others:
            self._send_words(rank, checkpoint or "")
        return [self._receive_words(rank, RankReady) for rank in self._others]

    def begin_step(self, step: int, epoch: int, *, ends_epoch: bool) -> None:
        for rank in self._others:
            self._order(rank, STEP, step, samples=(epoch, ends_epoch))

    def deal(
        self, positions: Sequence[int], samples_of: Callable[[Sequence[int]], list[int]], least: int = 1
    ) -> tuple[int, ...]:
        """Give every rank its part of a round. Returns rank 0's part, which is never smaller than another's."""
        parts = shares(positions, self.world, least)
        for rank in self._others:
            self._order(rank, WORK, samples=samples_of(parts[rank]))
        return parts[0]

    def deal_nothing(self) -> None:
        """A round of rank 0 alone. The others count it, so that all have the same number in flight."""
        for rank in self._others:
            self._order(rank, WORK)

    def land(self) -> None:
        """Let the others finish their work; only needed if their devices queue."""
        for rank in self._others:
            self._order(rank, LAND)

    def landed(self) -> None:
        """Wait until every rank has computed its part of the oldest unfinished round."""
        for rank in self._others:
            self._receive(torch.empty(1, dtype=torch.int64), rank)

    def update(self, *, compare: bool, samples: int) -> None:
        """`samples`: of the whole step."""
        for rank in self._others:
            self._order(rank, UPDATE, int(compare), samples=(samples,))

    def compare_weights(self, names: Sequence[str], trained: Sequence[nn.Parameter], step: int) -> None:
        """Compare weights after an update that requests it. The error names what differs from rank 0's weights, and
        on which rank."""
        own = gradient_sum.hashes(trained)
        for rank in self._others:
            theirs = self._receive(torch.empty_like(own), rank)
            differing = [name for name, same in zip(names, (own == theirs).tolist()) if not same]
            if differing:
                raise LoopError(
                    f"rank {rank}'s weights are not rank 0's: {len(differing)} of {len(names)} tensors differ, "
                    f"the first is {differing[0]}",
                    hint="whatever changes weights or optimizer must do so on every rank; continue with --resume",
                    step=step,
                )

    def end(self, *, strict: bool = False) -> None:
        """Tell the others that the training is over. With `strict`, an error names the ranks that could not be
        told."""
        if self._ended:
            return
        self._ended = True
        with contextlib.nullcontext() if strict else contextlib.suppress(RankGoneError):
            for rank in self._others:
                self._order(rank, END)
            self._sent(GOODBYE_S)
        self._leave()

    # -- the others -------------------------------------------------------------------------------------

    def meet(self) -> str | None:
        """The checkpoint that rank 0 resumes from."""
        return self._receive_words(0, str) or None

    def answer(self, about: RankReady) -> None:
        self._send_words(0, about)

    def order(self) -> Order:
        """Wait for rank 0's next order."""
        what, number, count = self._receive(torch.empty(3, dtype=torch.int64), 0).tolist()
        samples = self._receive(torch.empty(count, dtype=torch.int64), 0).tolist() if count else ()
        if what == END:
            self._ended = True
            self._leave()
        return Order(what, number, tuple(samples))

    def done(self) -> None:
        """This rank's part of the oldest round is computed."""
        self._send(0, torch.ones(1, dtype=torch.int64))

    def show_weights(self, trained: Sequence[nn.Parameter]) -> None:
        self._send(0, gradient_sum.hashes(trained))

    # -- everybody together -----------------------------------------------------------------------------

    def equalize(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's values to all ranks."""
        with self._together(), torch.no_grad():
            for tensor in tensors:
                values = tensor.detach().contiguous()
                dist.broadcast(values, 0, group=self._sums)
                if values.data_ptr() != tensor.data_ptr():
                    tensor.copy_(values)

    def sum_gradients(
        self, trained: Sequence[nn.Parameter], totals: Sequence[Tensor | float], finite: Tensor
    ) -> Tensor:
        """Add up the ranks' gradients in place, and their `totals`. What no rank used stays without a gradient.

        The sums of `totals`, and for each rank whether its own gradient was not `finite`: see `add_up`.
        """
        with self._together():
            return gradient_sum.add_up(trained, totals, finite=finite, sums=self._sums, control=self._control)

    def agree(self, finite: Tensor) -> Tensor:
        """Whether this is true on every rank, as a bool on the device: either all ranks update or none does."""
        with self._together():
            doubts = (~finite).float().reshape(1)
            dist.all_reduce(doubts, dist.ReduceOp.MAX, group=self._sums)
            return doubts[0] == 0

    # -- messages ---------------------------------------------------------------------------------------

    def _order(self, rank: int, what: int, number: int = 0, samples: Sequence[int] = ()) -> None:
        self._send(rank, torch.tensor([what, number, len(samples)], dtype=torch.int64))
        if samples:
            self._send(rank, torch.tensor(list(samples), dtype=torch.int64))

    def _send(self, rank: int, values: Tensor) -> None:
        """Waits only if the last messages were not received."""
        while len(self._sending) > 4 * self.world:
            self._sent_oldest(PATIENCE_S)
        with self._together(rank):
            self._sending.append((dist.isend(values, rank, group=self._control, tag=_TAG), values))

    def _sent(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self._sending:
            self._sent_oldest(max(0.1, deadline - time.monotonic()))

    def _sent_oldest(self, within_s: float) -> None:
        work, _ = self._sending.popleft()
        with self._together():
            work.wait(timedelta(seconds=within_s))

    def _receive(self, room: Tensor, rank: int) -> Tensor:
        with self._together(rank):
            work = dist.irecv(room, rank, group=self._control, tag=_TAG)
            assert work is not None
            work.wait(timedelta(seconds=PATIENCE_S) if self.place.leads else FOREVER)
        return room

    def _send_words(self, rank: int, words: str | RankReady) -> None:
        content = torch.frombuffer(bytearray(msgspec.json.encode(words)), dtype=torch.uint8)
        self._send(rank, torch.tensor([content.numel()], dtype=torch.int64))
        self._send(rank, content)

    def _receive_words(self, rank: int, kind: type[T]) -> T:
        size = int(self._receive(torch.empty(1, dtype=torch.int64), rank))
        words = bytes(self._receive(torch.empty(size, dtype=torch.uint8), rank).tolist())
        return checked.decode(words, kind)

    @contextlib.contextmanager
    def _together(self, rank: int | None = None) -> Iterator[None]:
        """Turn torch's errors about broken connections and timeouts into errors that name the rank."""
        try:
            yield
        except RuntimeError as error:
            raise RankGoneError(self._who(rank), hint=_HINT) from error

    def _who(self, waited_for: int | None) -> str:
        deadline = time.monotonic() + NOTICE_S
        while time.monotonic() < deadline:
            for rank, pid in enumerate(self._pids):
                if not _lives(pid):
                    return f"rank {rank} of this host is gone"
            time.sleep(LOOK_S / 10)
        who = "another rank" if waited_for is None else f"rank {waited_for}"
        return f"{who} of this host does not answer"

    def _leave(self) -> None:
        if self._ours and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


class RoundMark(Mark):
    """A mark that is reached when rank 0's own device and every other rank have computed a round."""

    def __init__(self, own: Mark, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def wait(self) -> None:
        self._own.wait()
        self._ranks.landed()

    def passed(self) -> bool:
        return False  # nobody can tell without waiting


def shares(positions: Sequence[int], world: int, least: int = 1) -> list[tuple[int, ...]]:
    """Parts as equal as possible, the larger ones first. Some are empty if there are too few samples for `least`
    each."""
    parts = min(world, max(1, len(positions) // least))
    ends = [-(-len(positions) * min(part, parts) // parts) for part in range(world + 1)]
    return [tuple(positions[start:stop]) for start, stop in itertools.pairwise(ends)]
