"""Chooses the device of this process by its name, with the reason. Each kind has a factory in a table."""

from __future__ import annotations

from collections.abc import Callable

import torch

from potluck import env
from potluck.device import cuda, mps, paced
from potluck.device.base import Device
from potluck.device.cpu import CpuDevice
from potluck.device.trace import Trace
from potluck.errors import ConfigError
from potluck.limits import usable_cores
from potluck.plan.devices import NO_NEURAL_ENGINE

Factory = Callable[[str], Device]
"""Makes the device of a kind. Its argument is the text after the colon ("1" of "cuda:1"), or "".

It raises ConfigError for an unknown text.
"""


def _make_cpu(argument: str) -> Device:
    if argument:
        raise ConfigError(
            f"the device cpu takes nothing after a colon, not {argument!r}",
            hint="use --device cpu, and --threads for its number of threads",
        )
    return CpuDevice()


FACTORIES: dict[str, Factory] = {"cpu": _make_cpu, "cuda": cuda.make, "mps": mps.make, "paced": paced.make}


MOST_THREADS = 4096

_NEURAL_ENGINES = ("ane", "coreml", "neural-engine", "npu")


def pick(name: str | None = None, *, threads: int | None = None) -> Device:
    """The device to compute on. Also sets torch's CPU threads, and starts a trace if POTLUCK_TRACE is set.

    `name`: None or "auto" (CUDA, then MPS, then the CPU), "cpu", "cuda", "cuda:1", "mps", "paced:0.15" (seconds a
    sample, on the CPU), "paced:0.6,9=0.3" (0.6, and 0.3 from step 9 on). `threads`: None for torch's present number
    (which the script or OMP_NUM_THREADS may have set), but at most one for each core that this process may use.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"{threads} threads cannot compute", hint=f"use --threads from 1 to {MOST_THREADS}")
    # torch counts the cores of the machine, not of this process's share of it.
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if threads is None else threads)
    device = _pick_best() if name is None or name == "auto" else _make(name)
    trace = env.read().trace
    if trace is not None:
        device.trace = Trace(trace)
    return device


def gpus() -> int:
    """Number of GPUs of this machine for ranks, one each."""
    return torch.cuda.device_count() if cuda.why_not() is None else 0


def pick_for_rank(
    name: str | None, local_rank: int, world: int, *, threads: int | None = None
) -> tuple[Device, bool]:
    """The device of one of several processes on this machine, and whether NCCL can join them: each has its own GPU.

    `name`: None, "auto" or "cuda" for the GPU of that number (without CUDA, the CPU for all); "cuda:0" is that GPU
    for all ranks. `threads`: None for an equal share of the cores.
    """
    threads = threads or max(1, usable_cores() // world)
    asked = (name or "auto").strip().lower()
    if asked == "mps":
        raise ConfigError(
            f"{world} ranks cannot share the device mps", hint="a Mac has one GPU: start without torchrun"
        )
    if asked not in ("auto", "cuda"):
        return pick(name, threads=threads), False
    if asked == "auto" and cuda.why_not() is not None:
        return pick("cpu", threads=threads), False
    count = torch.cuda.device_count()
    if cuda.why_not() is None and local_rank >= count:
        raise ConfigError(
            f"{world} ranks, but only {count} GPU{'s' if count > 1 else ''} on this machine",
            hint=f"torchrun --nproc-per-node {count}, or --device cpu",
        )
    device = pick(f"cuda:{local_rank}", threads=threads)
    device.reason = "CUDA is available, and each rank has a GPU of its own"
    return device, True


def _make(name: str) -> Device:
    kind, _, argument = name.strip().lower().partition(":")
    if kind in _NEURAL_ENGINES:
        raise ConfigError(NO_NEURAL_ENGINE, hint="use --device mps: the Mac's GPU trains")
    if kind not in FACTORIES:
        raise ConfigError(
            f"unknown device {name!r}",
            hint="use one of: auto, cpu, cuda, cuda:1, mps, paced:0.15 (seconds a sample)",
        )
    return FACTORIES[kind](argument)


def _pick_best() -> Device:
    device: Device
    no_cuda = cuda.why_not()
    if no_cuda is None:
        device = cuda.CudaDevice()
        device.reason = "CUDA is available"
        return device
    no_mps = mps.why_not()
    if no_mps is None:
        device = mps.MpsDevice()
        device.reason = "MPS is available"
        return device
    device = CpuDevice()
    # Of what the machine does not have, nobody wants to read.
    why = [f"CUDA is not available: {no_cuda}"] if cuda.seems_present() else []
    why += [f"MPS is not available: {no_mps}"] if torch.backends.mps.is_built() else []
    device.reason = "; ".join(why) or "no GPU found"
    return device
