"""The settings of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from potluck.bounds import Amount, Many, Natural, Positive, Short

LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]

WEB_HERE = "127.0.0.1"
"""Default address of the page in the browser: this machine only."""
MOST_GUESTS = 64
"""The most guests that one host admits."""
MEMORY_PART = 0.5
"""The share of the free memory that activations may fill."""
MOST_MICRO_BATCH = 256
"""The most samples that a machine computes at once, however much memory it has."""


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a run that do not depend on what it trains."""

    device: Short | None = None
    """cpu, cuda, mps or paced:SECONDS; if not given, CUDA, else MPS, else the CPU."""
    threads: Positive | None = None
    """Number of CPU threads for torch; the physical cores if not given."""
    name: Short | None = None
    """Name of this machine in logs and tables; the host name if not given."""
    micro_batch: Positive | None = None
    """Samples computed at once on this machine; found by measuring if not given."""
    codec: Short = "auto"
    """Compression of weight changes and gradients: none, fp16, bf16, int8, int4, thin or topk:RATIO; auto: int4, or
    thin for guests whose link is the bottleneck; weights in fp16 where the model needs it."""
    codec_down: Short | None = None
    """Compression of weight changes only; if not given, it follows from `codec` (topk: int8, thin: thin:1.25)."""
    bind: Short | None = None
    """The address to listen on; that of the default route if not given, 0.0.0.0 for all."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port to listen on; 0 for a free one."""
    wait_for: Natural = 0
    """Guests to wait for before the first step."""
    wait_s: Annotated[float, Meta(ge=0, le=1e7)] = 120.0
    """Seconds to wait for these guests."""
    replica: Literal["auto", "device", "host"] = "auto"
    """Place of the host's copy of the guests' weights, 4 bytes per parameter: on its device, or in host memory
    (which auto chooses on a GPU)."""
    checkpoint_every: Natural = 50
    """Steps between two checkpoints; 0 for only one at the end."""
    check_replica_every: Natural = 50
    """Steps between two comparisons, by hash, of the guests' weights with the host's replica, and of the host's
    ranks with each other; 0 for none."""
    max_bad_steps: Natural = 5
    """Stop after this many steps in a row with a NaN or infinite gradient; 0: never."""
    guest_bound: Amount = 1000.0
    """Largest norm per sample of a guest's gradient that counts, as a multiple of the host's own; 0: no limit."""
    log: Many[LoggerName] = ()
    """Loggers that the host writes the run's series to."""
    web: Short | None = None
    """Address of the page in the browser, with a port if it must not be a free one; no page if not given."""
