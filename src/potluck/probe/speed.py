"""Measures a device: training a recipe, matrix products, its memory, copies to and from the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from potluck.device import Device
from potluck.errors import ConfigError
from potluck.plan import models
from potluck.probe.measuring import Say
from potluck.spec.config import MEMORY_PART
from potluck.spec.probed import DeviceSpeed
from potluck.train.data import Loader, to_device
from potluck.train.microbatch import MicroBatch
from potluck.train.recipes import Recipe
from potluck.train.recipes.modes import compiled, precision
from potluck.train.step import SavedBytes
from potluck.units import bytes_text

TRAINING_PART, MATMUL_PART, MEMORY_TIME_PART = 0.6, 0.25, 0.15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_MATRIX, LARGEST_MATRIX = 128, 8192
ENOUGH_S = 0.02
"""A product of this duration is large enough that starting it does not count."""
COPIED_BYTES = 64 << 20
MOST_MEMORY_PART = 0.125
"""Share of the free memory for a measurement's own tensors."""
MOST_SAMPLES = 64
LEAST_RUNS = 3
BUSY = 1.0
"""Running programs per core. With more than this, the figures are not the device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The workload of the measurement."""

    recipe: Recipe
    config: Any
    micro_batch: int | None = None


def measure(device: Device, training: Training, name: str, seconds: float, progress: Say) -> DeviceSpeed:
    """All figures of a device, in about `seconds`, plus the time to make the model and its data."""
    busy = busy_note(psutil.getloadavg()[0], psutil.cpu_count() or 1)  # now: measuring is a load, too
    progress(f"preparing {training.recipe.name}")
    trained = _trained(name, device, training, TRAINING_PART * seconds, progress)
    rates = {}
    for dtype, kind in DTYPES.items():
        progress(f"matrix products in {dtype}")
        rate = matmul_flops_per_s(device, kind, MATMUL_PART * seconds / len(DTYPES))
        if rate is not None:
            rates[dtype] = rate
    progress("memory")
    share = MEMORY_TIME_PART * seconds / 3
    copied = memory_bytes_per_s(device, share)
    there, back = copies_bytes_per_s(device, share) if device.torch_device.type != "cpu" else (None, None)
    memory = device.memory()
    return replace(
        trained,
        device=device.label,
        reason=device.reason,
        memory_bytes=memory.total_bytes,
        memory_free_bytes=memory.free_bytes,
        matmul_flops_per_s=rates,
        note=busy,
        memory_bytes_per_s=copied,
        to_device_bytes_per_s=there,
        from_device_bytes_per_s=back,
    )


def busy_note(load: float, cores: int) -> str:
    """A note if other programs kept more cores busy in the last minute than this machine has."""
    if load <= BUSY * cores:
        return ""
    of = f"{cores} core{'s' * (cores > 1)}"
    return (
        f"this machine is busy (load {load:.{0 if load >= 9.95 else 1}f} on {of}): measure again when it is quiet"
    )


# -- training ---------------------------------------------------------------------------------------------------


def _trained(name: str, device: Device, training: Training, seconds: float, progress: Say) -> DeviceSpeed:
    """The figures from training; the others are added later."""
    recipe, config = training.recipe, training.config
    loader = Loader(lambda: recipe.dataset(config), None)
    limit = min(MOST_SAMPLES, loader.samples)
    if (training.micro_batch or 1) > loader.samples:
        raise ConfigError(
            f"a micro-batch of {training.micro_batch} samples, but {recipe.name} has {loader.samples}",
            hint="a smaller --micro-batch, or more data",
        )
    words, planned, sequence, flops = described(recipe, config)
    _check_room(device, planned, sequence)
    model = recipe.model(config).to(device.torch_device)
    # As on a guest: compiling takes longer than all the rest. `--set compile=yes` has it compiled.
    recipe.compile(model, config, device.torch_device, guest=True)
    device.attach(model)
    batch = loader.fetch(range(max(limit, training.micro_batch or 1)))
    micro = MicroBatch(fixed=training.micro_batch, limit=limit, free_bytes=device.memory().free_bytes)
    trainer = _TimedTraining(device, recipe, config, model, batch)
    progress(f"training {recipe.name}")
    try:
        per_sample, variation, saved = _timed(trainer, micro, seconds)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"this model does not fit into the memory of {device.label}", hint="a smaller one: --depth, --sequence"
        ) from None
    parameters = sum(p.numel() for p in model.parameters())
    flops = flops or 6.0 * parameters * (sequence or 1)
    if isinstance(precision(device.torch_device, config.precision), torch.autocast):
        words += ", bf16"
    if compiled(getattr(config, "compile", "no"), device.torch_device, guest=True):
        words += ", compiled"
    return DeviceSpeed(
        name=name,
        training=words,
        model=planned,
        sequence=sequence,
        parameters=parameters,
        samples_per_s=1 / per_sample,
        samples_variation=variation,
        flops_per_s=flops / per_sample,
        micro_batch=micro.size(),
        saved_bytes_per_sample=saved or None,
        largest_micro_batch=largest(micro.size(), micro.free_bytes, saved),
    )


class _TimedTraining:
    """Forward and backward of a micro-batch, timed by the device itself."""

    def __init__(self, device: Device, recipe: Recipe, config: Any, model: nn.Module, batch: Any) -> None:
        self._device, self._recipe, self._config, self._model = device, recipe, config, model
        self._batch = to_device(batch, device)

    def once(self, samples: int) -> float:
        part = _first(self._batch, samples)
        self._device.begin(samples)
        self._recipe.loss(self._model, part, self._config).backward()
        return self._device.end()


def _timed(trainer: _TimedTraining, micro: MicroBatch, seconds: float) -> tuple[float, float | None, float]:
    """Seconds per sample at the best size, their variation, and bytes kept for a sample's backward."""
    saved = 0.0
    times: dict[int, list[float]] = {}
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end or done <= LEAST_RUNS:
        size = micro.size()
        counter = SavedBytes() if micro.searching or not done else None
        if counter is not None:
            counter.start()
        try:
            took = trainer.once(size)
        finally:
            kept = counter.stop() if counter is not None else 0
        saved = max(saved, kept / size)
        micro.record(size, took, kept)
        if done and counter is None:  # the first includes one-time start-up work, and counting costs time
            times.setdefault(size, []).append(took / size)
        done += 1
        if micro.searching and time.monotonic() > end - seconds / 3 and done > LEAST_RUNS:
            micro.stop()  # so that the last third of the time is for that size alone
    settled = times.get(micro.size()) or [took / size]
    # The mean of the faster half: another program's turn on a core is not this device's speed.
    best = sorted(settled)[: max(1, (len(settled) + 1) // 2)]
    return sum(best) / len(best), spread(settled), saved


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation ÷ mean; None if there are too few values."""
    return statistics.pstdev(values) / statistics.fmean(values) if len(values) >= LEAST_RUNS else None


def _first(batch: Any, samples: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[:samples]
    return type(batch)(_first(part, samples) for part in batch)


def largest(size: int, free_bytes: int | None, saved_bytes_per_sample: float) -> int | None:
    """The estimated largest micro-batch, from the part of the free memory that a run would fill."""
    if free_bytes is None or not saved_bytes_per_sample:
        return None
    return max(size, int(MEMORY_PART * free_bytes / saved_bytes_per_sample))


def described(recipe: Recipe, config: Any) -> tuple[str, str, int | None, float | None]:
    """A description of the training; its name for a plan and FLOPs per sample, if plans know it; tokens per
    sample."""
    tokens = recipe.tokens_per_sample(config)
    # A plan counts with the recipe's own tables and data.
    usual = getattr(config, "vocabulary", None) is None and (recipe.name != "cnn" or config.data is None)
    planned = f"gpt:{config.depth}" if recipe.name == "gpt" else recipe.name
    words = f"gpt depth {config.depth}, sequence {tokens}" if recipe.name == "gpt" else recipe.name
    if usual:
        return words, planned, tokens, models.find(planned, tokens).flops_per_sample
    return words, "", tokens, None


def _check_room(device: Device, planned: str, sequence: int | None) -> None:
    """Refuse a model whose weights and gradients do not fit, before it is made."""
    free = device.memory().free_bytes
    needed = 8 * models.find(planned, sequence).parameters if planned else 0
    if needed > free:
        raise ConfigError(
            f"this model needs {bytes_text(needed)} for weights and gradients, and {bytes_text(free)} are free",
            hint="a smaller one: --depth",
        )


# -- products and copies ----------------------------------------------------------------------------------------


def matmul_flops_per_s(device: Device, dtype: torch.dtype, seconds: float) -> float | None:
    """FLOP/s with the largest square matrices that the time allows; None if the device does not support the
    format."""
    end = time.monotonic() + seconds
    size, best = SMALLEST_MATRIX, 0.0
    room = MOST_MEMORY_PART * device.memory().free_bytes
    try:
        while True:
            multiply = _product(device, size, dtype)
            took = _fastest(device, multiply, 0.0, least=1)
            best = max(best, 2.0 * size**3 / took)
            large = took >= ENOUGH_S or size >= LARGEST_MATRIX or 12 * (2 * size) ** 2 > room
            if large or time.monotonic() >= end:
                return max(best, 2.0 * size**3 / _fastest(device, multiply, end, least=1))
            size *= 2
    except (RuntimeError, NotImplementedError):  # an unknown format, or no memory
        return best or None


def _product(device: Device, size: int, dtype: torch.dtype) -> Callable[[], Any]:
    a = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    b, c = torch.ones_like(a), torch.empty_like(a)
    return lambda: torch.mm(a, b, out=c)


def memory_bytes_per_s(device: Device, seconds: float) -> float | None:
    """Bytes read and written by copying within the device's memory."""
    size = int(min(4 * COPIED_BYTES, MOST_MEMORY_PART / 2 * device.memory().free_bytes))
    try:
        source = torch.ones(max(size, 1 << 20), dtype=torch.uint8, device=device.torch_device)
        target = torch.zeros_like(source)
        return 2 * source.nbytes / _fastest(device, lambda: target.copy_(source), time.monotonic() + seconds)
    except RuntimeError:
        return None


def copies_bytes_per_s(device: Device, seconds: float) -> tuple[float, float]:
    """Copy to the device and back, as a run does with tensors."""
    host = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    there = device.from_host(host)
    down = _fastest(device, lambda: device.from_host(host), time.monotonic() + seconds)
    up = _fastest(device, lambda: device.to_host(there), time.monotonic() + seconds)
    return host.nbytes / down, host.nbytes / up


def _fastest(device: Device, work: Callable[[], Any], end: float, least: int = LEAST_RUNS) -> float:
    """Seconds of the fastest of some runs; the first does not count."""
    work()
    device.synchronize()
    best, runs = float("inf"), 0
    while runs < least or time.monotonic() < end:
        began = time.perf_counter()
        work()
        device.synchronize()
        best, runs = min(best, time.perf_counter() - began), runs + 1
    return max(best, 1e-9)
