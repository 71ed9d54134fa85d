"""The input and the result of a plan: machines with speeds and links, a job, predictions, levers."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from potluck.bounds import Finite, Many, Named, Natural, Text
from potluck.checked import nearest
from potluck.errors import ConfigError

FP32_BYTES = 4
SOLO, DDP, DDP_BALANCED, POTLUCK = "solo", "ddp", "ddp-balanced", "potluck"
DDP_OVERLAP, DDP_BF16, DDP_INT8, DDP_ACCUMULATE = "ddp-overlap", "ddp-bf16", "ddp-int8", "ddp-accumulate"
ZERO, FSDP = "zero", "fsdp"
STRATEGIES = (
    SOLO, DDP, DDP_BALANCED, DDP_OVERLAP, DDP_BF16, DDP_INT8, DDP_ACCUMULATE, ZERO, FSDP, POTLUCK,
)  # fmt: skip


class FleetMachine(Struct, frozen=True, kw_only=True):
    """The figures of one machine that a prediction needs."""

    name: Text
    samples_per_s: Finite
    """Samples per second while it computes."""
    update_s: Finite = 0.0
    """Time of the optimizer's update of the whole model."""
    link_bytes_per_s: Finite | None = None
    """Payload rate of its link in each direction; None: no limit."""
    latency_s: Finite = 0.0
    """One-way latency of its link."""
    micro_batch: Natural = 4
    """Samples computed at once."""
    largest_micro_batch: Natural = 256
    """The most samples that it could compute at once."""
    by_memory: bool = False
    """Whether the plan chose both by the memory that potluck leaves; else they were given or measured."""
    memory_bytes: Finite | None = None
    device: Text = ""
    link: Text = ""
    """Name of the link, if it has one."""
    node: Text = ""
    """The machine that contains this device, if several of its devices are planned: each is a rank."""
    node_devices: Natural = 1
    """How many devices share the node's link."""
    intra: Text = ""
    """Name of the link between the devices of the node."""
    intra_bytes_per_s: Finite | None = None
    """Payload rate of each device to the others of its node, in each direction; None: no limit."""
    intra_latency_s: Finite = 0.0
    watts: Finite | None = None
    """Power while it trains; None: not known."""

    @property
    def sample_s(self) -> float:
        return 1 / self.samples_per_s

    @property
    def bytes_per_s(self) -> float:
        return math.inf if self.link_bytes_per_s is None else self.link_bytes_per_s

    def is_beside(self, other: FleetMachine) -> bool:
        """Whether both are devices of one node."""
        return bool(self.node) and self.node == other.node


class Job(Struct, frozen=True, kw_only=True):
    """The figures of what is trained."""

    name: Text
    parameters: Natural
    """Number of trained parameters: each has a gradient that is sent."""
    batch: Natural
    """Samples per step, over all machines."""
    tokens_per_sample: Natural = 1
    codec: Text = "int4"
    """Compression that potluck uses for weight changes and gradients."""
    activation_bytes_per_sample: Finite | None = None
    bytes_per_parameter: Finite = FP32_BYTES
    """Bytes per parameter of an uncompressed gradient."""

    @property
    def gradient_bytes(self) -> float:
        return self.bytes_per_parameter * self.parameters

    def with_batch(self, batch: int) -> Job:
        return replace(self, batch=batch)


class Fleet(Struct, frozen=True, kw_only=True):
    """Machines; the first is the host."""

    machines: Many[FleetMachine]

    def __post_init__(self) -> None:
        if not self.machines:
            raise ConfigError("there is no machine to plan for", hint='for example --machine "desk=RTX 4070"')
        names = [m.name for m in self.machines]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two machines are called {name!r}", hint="give each its own name")

    @property
    def host(self) -> FleetMachine:
        return self.machines[0]

    @property
    def guests(self) -> tuple[FleetMachine, ...]:
        return self.machines[1:]

    @property
    def nodes(self) -> tuple[tuple[FleetMachine, ...], ...]:
        """The machines by node. A machine without a node is its own node."""
        found: dict[str, list[FleetMachine]] = {}
        for machine in self.machines:
            found.setdefault(machine.node or f"={machine.name}", []).append(machine)
        return tuple(tuple(group) for group in found.values())

    def machine(self, name: str) -> FleetMachine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise ConfigError(f"there is no machine {name!r}", hint=nearest(name, [m.name for m in self.machines]))

    def without(self, name: str) -> Fleet:
        return Fleet(machines=tuple(m for m in self.machines if m.name != name))

    def hosted_by(self, name: str) -> Fleet:
        host = self.machine(name)
        return Fleet(machines=(host, *(m for m in self.machines if m is not host)))

    def changed(self, name: str, **values: Any) -> Fleet:
        """A fleet with other values for one machine."""
        return Fleet(machines=tuple(replace(m, **values) if m.name == name else m for m in self.machines))


class Prediction(Struct, frozen=True, kw_only=True):
    """One strategy on one fleet."""

    strategy: Text
    step_s: Finite
    compute_s: Finite
    """Compute time of the machine that computes longest."""
    exchange_s: Finite
    """Time in which bytes are sent, hidden or not."""
    exposed_s: Finite
    """Time of the step in which a machine waits for the network."""
    speedup: Finite
    """Speed-up over the fastest machine alone."""
    efficiency: Finite
    """Samples/s ÷ the sum of the samples/s of each machine alone."""
    shares: Named[Natural]
    """Samples per step of each machine; 0: it sits out."""
    idle_s: Named[Finite]
    """Time of a step in which each machine computes nothing."""
    memory_bytes: Named[Finite]
    waits: Text = ""
    """A sentence that says which machine waits for which."""
    note: Text = ""
    """A remark if it is not the same training or does not fit."""
    fits: bool = True
    """Whether it fits into every machine's memory, as far as known."""


class Lever(Struct, frozen=True, kw_only=True):
    """One possible change and its predicted effect."""

    what: Text
    speedup: Finite
    gain: Finite
    """Step time now ÷ step time with the change, for the same samples."""
    same_training: bool = True
    """False if it changes the result of the training, not only its speed (another batch, a coarser codec)."""


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of a strategy."""

    what: Text
    strategy: Text
    units_per_s: Finite
    """Tokens per second; samples per second if the model has no tokens."""
    watts: Finite | None
    """Power of all machines that compute; None if rented."""
    per_hour: Finite
    per_billion: Finite
    """Cost of a billion tokens (samples)."""


class Plan(Struct, frozen=True, kw_only=True):
    """The predictions of all strategies on one fleet, with a verdict and levers."""

    job: Job
    fleet: Fleet
    rows: Many[Prediction]
    ideal_speedup: Finite
    verdict: Text
    levers: Many[Lever] = ()
    assumptions: Many[Text] = ()
    costs: Many[Cost] = ()

    def row(self, strategy: str) -> Prediction:
        for row in self.rows:
            if row.strategy == strategy:
                return row
        raise ConfigError(f"the plan has no strategy {strategy!r}", hint=nearest(strategy, list(STRATEGIES)))
