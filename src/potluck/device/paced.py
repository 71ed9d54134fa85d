"""A device of a chosen speed: real mathematics on the CPU or a GPU, then sleep until the emulated time has passed.

It exists to measure fleets on one machine, so it must be accurate: no gradient may be available before the emulated
device could have computed it.

The micro-batch's emulated time is a line that starts at begin(): a third for the forward, two thirds for the
backward, spread over the layers by their numbers of elements. Hooks on the layers delay the computation until its
point on the line. Points are absolute, so later layers make up for slow work and long sleeps. Waiting for the
network moves the whole line.

The speed may change from step to step, as that of a machine that gets hot or has other work does.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from potluck.device import cuda
from potluck.device.base import Device
from potluck.device.cpu import CpuDevice
from potluck.errors import ConfigError

FORWARD_PART = 1 / 3
"""The backward computes two products, for the input and for the weight, where the forward computes one."""


LABEL = "paced"
"""The first word of a paced device's label: where it computes, another machine is emulated."""


class Pacing(Device):
    """Slows the device that follows it among the base classes down to `seconds_per_sample`.

    A slower device keeps its own speed. On a device with a queue, no work is queued before its time. `changes`:
    (step, seconds per sample from that step on), with increasing steps counted from 1.
    """

    kind = "paced"
    ahead = 0

    def __init__(self, seconds_per_sample: float, changes: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__()  # type: ignore[call-arg]  # the other base class's
        self.peak_flops = None
        self.seconds_per_sample = seconds_per_sample
        """Seconds per sample in the current step."""
        self._speeds = [(1, seconds_per_sample), *changes]
        self.label = f"{LABEL} {seconds_per_sample:g} s/sample on {self.torch_device.type}"
        self.label += ", changing" if changes else ""
        self._hooks: list[RemovableHandle] = []
        self._forward_work: dict[nn.Module, int] = {}  # what a call of the module concludes, in elements
        self._backward_work: dict[Tensor, int] = {}  # what the arrival of the parameter's gradient concludes
        self._forward_total = 0  # of a whole forward: at first every module once, then as it was last time
        self._backward_total = 0
        self._calls: Counter[nn.Module] = Counter()
        self._forward_done = 0
        self._backward_done = 0
        self._line_start_s = 0.0
        self._line_s = 0.0
        self._overslept_s = 0.0

    def attach(self, model: nn.Module) -> None:
        """Hook the model's layers and trained parameters; another call replaces the first.

        Call it before any code that sends gradients hooks them, because hooks run in the order of registration.
        """
        for hook in self._hooks:
            hook.remove()
        self._forward_work = _forward_work(model)
        self._forward_total = sum(self._forward_work.values())
        self._backward_work, self._backward_total = _backward_work(model)
        # A compiled model would be traced through them; it is held back to its backward, and at its end.
        compiled = any(module._compiled_call_impl is not None for module in model.modules())
        layers = [] if compiled else list(self._forward_work)
        self._hooks = [module.register_forward_hook(self._after_forward) for module in layers]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(self._after_gradient) for parameter in self._backward_work
        ]

    def at_step(self, step: int) -> None:
        self.seconds_per_sample = [seconds for first, seconds in self._speeds if first <= max(1, step)][-1]

    def begin(self, samples: int) -> None:
        super().begin(samples)
        assert self._began_s is not None
        self._calls.clear()
        self._forward_done = self._backward_done = 0
        self._line_s = samples * self.seconds_per_sample
        # The last micro-batch's sleep ended late, as the emulated device would not: start that much earlier.
        self._line_start_s = self._began_s - min(self._overslept_s, self._line_s / 2)
        self._overslept_s = 0.0

    def waited(self, seconds: float) -> None:
        super().waited(seconds)
        self._line_start_s += seconds

    def end(self) -> float:
        self._hold_until(1.0)
        late_s = time.perf_counter() - self._line_start_s - self._line_s
        self._overslept_s = min(self._overslept_s, max(0.0, late_s))  # the rest of it is work that was slow
        if self._calls:
            self._forward_total = sum(self._forward_work[module] * n for module, n in self._calls.items())
        return super().end()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if self._began_s is None or self._backward_done:  # during the backward: activations computed again
            return
        self._calls[module] += 1
        self._forward_done += self._forward_work[module]
        self._hold_until(FORWARD_PART * _share(self._forward_done, self._forward_total))

    def _after_gradient(self, parameter: Tensor) -> None:
        if self._began_s is None:
            return
        self._backward_done += self._backward_work[parameter]
        share = _share(self._backward_done, self._backward_total)
        self._hold_until(FORWARD_PART + (1 - FORWARD_PART) * share)

    def _hold_until(self, point: float) -> None:
        """Sleep until this point of the line, from 0 to 1, unless it has passed."""
        until_s = self._line_start_s + point * self._line_s
        left_s = until_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self._overslept_s = time.perf_counter() - until_s


class PacedDevice(Pacing, CpuDevice):
    """The CPU, slowed down."""


class PacedCudaDevice(Pacing, cuda.CudaDevice):
    """A GPU, slowed down."""

    kind = "paced"


def _share(done: int, total: int) -> float:
    return min(1.0, done / total) if total else 1.0


def _parameters(model: nn.Module) -> list[tuple[nn.Module, Tensor, int]]:
    """(owner, parameter, work in elements) in the order of the forward; a tied one once for each owner.

    Looking up rows of an embedding is nearly free, so its weight counts no work there; a weight tied to an output
    head counts in the head.
    """
    return [
        (module, parameter, 0 if isinstance(module, nn.Embedding | nn.EmbeddingBag) else parameter.numel())
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    ]


def _forward_work(model: nn.Module) -> dict[nn.Module, int]:
    work: dict[nn.Module, int] = {}
    for module, _, elements in _parameters(model):
        work[module] = work.get(module, 0) + elements
    return work


def _backward_work(model: nn.Module) -> tuple[dict[Tensor, int], int]:
    """For each trained parameter the work that is finished when its gradient arrives, and the total work.

    The backward visits the layers in reverse. Work without its own hook (of frozen parameters, and all uses of a
    tied one except the last) is finished by the next gradient; the rest by end().
    """
    uses = _parameters(model)
    uses_left = Counter(parameter for _, parameter, _ in uses)
    work: dict[Tensor, int] = {}
    pending = 0
    for _, parameter, elements in reversed(uses):
        pending += elements
        uses_left[parameter] -= 1
        if parameter.requires_grad and not uses_left[parameter]:
            work[parameter], pending = pending, 0
    return work, sum(elements for _, _, elements in uses)


def make(argument: str) -> Pacing:
    """The device that "paced:0.6" names, or "paced:0.6,9=0.3", whose speed changes at step 9.

    "paced:0.6@cuda" computes on a GPU.
    """
    argument, _, on = argument.partition("@")
    if on not in ("", "cpu", "cuda"):
        raise ConfigError(
            f"a paced device computes on cpu or cuda, not on {on!r}", hint="for example paced:0.2@cuda"
        )
    first, *rest = argument.split(",")
    words = [word.partition("=") for word in rest]
    steps = [_step(step) for step, _, _ in words]
    if steps != sorted(set(steps)) or any(step < 2 for step in steps):
        raise ConfigError(
            f"the steps at which a paced device changes its speed must increase, unlike in {argument!r}",
            hint="for example --device paced:0.6,9=0.3,17=0.6: steps from 2 on, each with its seconds a sample",
        )
    changes = list(zip(steps, [_seconds(seconds) for _, _, seconds in words]))
    seconds = _seconds(first)
    if on != "cuda":
        return PacedDevice(seconds, changes)
    cuda.make("")  # says why not, where there is none
    return PacedCudaDevice(seconds, changes)


def _step(word: str) -> int:
    """The step's number; 0 if there is none."""
    word = word.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 9 else 0


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(
            f"a paced device needs its seconds a sample, not {word!r}", hint="for example --device paced:0.15"
        )
    return seconds
