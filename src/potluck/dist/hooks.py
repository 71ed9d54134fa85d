"""DDP communication hooks that compress gradients on any backend, with error feedback; also for gloo and NCCL.

model = DistributedDataParallel(net)
potluck.dist.compress(model, "int4")        # on every rank, once
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from potluck.codec.names import NAMES, parse_collective
from potluck.dist.compression import Compressor, Exchange
from potluck.errors import ConfigError

POWERSGD = "powersgd"
_MOST_RANK = 1024


def compress(
    model: DistributedDataParallel, how: str, *, feedback: bool = True, start_step: int = 100
) -> CompressedGradients | None:
    """Let DDP exchange compressed gradients. Call it on every rank, with the same arguments, before training.

    Args:
        model: wrapped by DistributedDataParallel, on any backend.
        how: a codec (fp16, bf16, int8, int4, topk, topk:0.05), or powersgd or powersgd:RANK, which is PyTorch's.
        feedback: add this step's rounding error in the next step. Without it int4 and topk train worse.
        start_step: for PowerSGD, the number of uncompressed steps at first.

    Returns:
        The hook's state, whose `sent_bytes` shows the savings; None for PowerSGD.

    Example:
        potluck.dist.compress(model, "int4")
        potluck.dist.compress(model, "powersgd:2", start_step=1000)
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"compress takes a DistributedDataParallel, not a {type(model).__name__}",
            hint="wrap the model first: model = DistributedDataParallel(model)",
        )
    family, colon, argument = how.strip().lower().partition(":")
    if family == POWERSGD:
        rank = _powersgd_rank(argument) if colon else 1
        state_of_torch = _powersgd_state(model.process_group, rank, feedback, start_step)
        model.register_comm_hook(state_of_torch, powersgd_hook)
        return None
    _check_codec(how)
    state = CompressedGradients(how, model.process_group, feedback=feedback)
    model.register_comm_hook(state, compressed_hook)
    return state


def compressed_hook(state: CompressedGradients, bucket: GradBucket) -> Future[Tensor]:
    """A DDP communication hook; `compress` registers it."""
    return state.start(bucket)


def powersgd_hook(state: powersgd.PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """PyTorch's hook; `compress` registers it.

    It starts further collectives when earlier ones end. NCCL's streams keep these in order; with other backends
    those of two buckets would run in a different order on each rank (gloo: "Received data size doesn't match"), so
    there one bucket ends before the next begins.
    """
    future = powersgd.powerSGD_hook(state, bucket)
    if dist.get_backend(state.process_group) != "nccl":
        future.wait()
    return future


# DDP reads the annotations of a hook, as types and not as text.
for _hook in (compressed_hook, powersgd_hook):
    _hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


class CompressedGradients:
    """The state of the hook: the codec, the residuals of each bucket, a thread, and its own process group.

    The thread processes buckets one after the other, during the backward pass. Each takes two collectives, which
    all ranks must make in the same order, so no other thread may use the group.
    """

    def __init__(self, codec: str, group: dist.ProcessGroup, *, feedback: bool = True) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.compressor = Compressor(codec, feedback=feedback)
        self.sent_bytes = 0
        """Bytes that this rank has sent."""
        self.exact_bytes = 0
        """Bytes that a ring of uncompressed gradients would have sent."""
        self._group: Any = dist.new_group(ranks)
        self._rank, self._world = dist.get_rank(self._group), len(ranks)
        # gloo moves host memory only, wherever the gradients are.
        self._through_host = dist.get_backend(self._group) == "gloo"
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="potluck-compress")

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """Start a bucket. The future gives its average over the ranks."""
        flat = bucket.buffer()
        # By the parameters, not by the bucket's number: DDP changes the buckets after the first step.
        identity = tuple(id(parameter) for parameter in bucket.parameters())
        on_gpu = flat.device.type == "cuda"
        done: Future[Tensor] = Future(devices=[flat.device]) if on_gpu else Future()
        ready = torch.cuda.current_stream(flat.device).record_event() if on_gpu else None
        failures: list[Exception] = []

        def outcome(_: Future[Tensor]) -> Tensor:
            # Raised here, it comes out of the backward pass; DDP does not support `set_exception`.
            if failures:
                raise failures[0]
            return flat

        def work() -> None:
            try:
                if ready is not None:
                    torch.cuda.set_device(flat.device)
                    ready.wait(torch.cuda.current_stream(flat.device))
                self._average(identity, flat)
            except Exception as error:
                failures.append(error)
            done.set_result(flat)

        self._worker.submit(work)
        return done.then(outcome)

    def close(self) -> None:
        """End the thread after its queued work. It also ends with the model."""
        self._worker.shutdown()

    @torch.no_grad()
    def _average(self, identity: tuple[int, ...], flat: Tensor) -> None:
        self.exact_bytes += 2 * (self._world - 1) * flat.nbytes // self._world
        if not Compressor.suits("AVG", flat.dtype):
            dist.all_reduce(flat, group=self._group)
            flat.div_(self._world)
            self.sent_bytes += 2 * (self._world - 1) * flat.nbytes // self._world
            return
        exchange = self.compressor.begin(identity, flat, self._rank, self._world, average=True)
        self._collect(exchange, flat.device)
        self._distribute(exchange, flat.device)

    def _collect(self, exchange: Exchange, device: torch.device) -> None:
        """Send each part to its owner, which adds."""
        mine = exchange.payload_bytes(self._rank)
        others = [part for part in range(self._world) if part != self._rank]
        sizes = [exchange.payload_bytes(part) if part != self._rank else 0 for part in range(self._world)]
        sent = self._carried(torch.cat([_nothing(device), *(exchange.outgoing(part) for part in others)]))
        expected = [mine if part != self._rank else 0 for part in range(self._world)]
        arrived = torch.empty(sum(expected), dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(arrived, sent, expected, sizes, group=self._group)
        self.sent_bytes += sum(sizes)
        for source, payload in enumerate(arrived.to(device).split(expected)):
            exchange.add(source, None if source == self._rank else payload)

    def _distribute(self, exchange: Exchange, device: torch.device) -> None:
        """Send each owner's sum to all. All rows have the length of the longest, as the collective needs it."""
        sizes = [exchange.payload_bytes(part) for part in range(self._world)]
        row = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        row[: sizes[self._rank]] = exchange.result()
        row = self._carried(row)
        rows = torch.empty(self._world * row.numel(), dtype=torch.uint8, device=row.device)
        dist.all_gather(list(rows.view(self._world, -1)), row, group=self._group)
        self.sent_bytes += (self._world - 1) * row.numel()
        for part, payload in enumerate(rows.to(device).view(self._world, -1)):
            exchange.place(part, payload[: sizes[part]])

    def _carried(self, payload: Tensor) -> Tensor:
        return payload.cpu() if self._through_host else payload


def _nothing(device: torch.device) -> Tensor:
    """An empty tensor, to concatenate if a rank is alone."""
    return torch.empty(0, dtype=torch.uint8, device=device)


def _check_codec(how: str) -> None:
    ways = ", ".join([*(name for name in NAMES if name not in ("none", "thin")), POWERSGD])
    try:
        family, _ = parse_collective(how)
    except ConfigError as error:
        raise ConfigError(f"{how!r} compresses nothing: {error.what}", hint=f"use one of {ways}") from None
    if family == "none":
        raise ConfigError("'none' compresses nothing", hint=f"leave the call out, or use one of {ways}")


def _powersgd_rank(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _MOST_RANK):
        raise ConfigError(f"powersgd:{text} has no rank", hint="give a small whole number, as in powersgd:2")
    return int(text)


def _powersgd_state(group: Any, rank: int, feedback: bool, start_step: int) -> powersgd.PowerSGDState:
    if start_step < 2:
        raise ConfigError(
            f"start_step={start_step}: PowerSGD needs uncompressed steps first",
            hint="give at least 2; a tenth of the training is usual",
        )
    return powersgd.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start_step,
        use_error_feedback=feedback,
    )
