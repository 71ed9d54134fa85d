"""Measured figures of machines, which a plan reads from the list `measured` in `facts.json`. None: not measured."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from potluck.bounds import Above0, Positive, Text


class Measured(Struct, frozen=True, kw_only=True):
    """One machine. The first in a list is the host, unless another has `host`."""

    name: Annotated[Text, Meta(min_length=1)]
    device: Text = ""
    samples_per_s: Above0 | None = None
    """Samples per second of the model in `model`, while computing."""
    model: Text = ""
    """Name of the model as in `potluck plan --model`: gpt:4, gpt2-124m."""
    sequence: Positive | None = None
    """Tokens per sample."""
    flops_per_s: Above0 | None = None
    """Effective FLOP/s while training, used to plan for another model."""
    memory_bytes: Above0 | None = None
    link_bytes_per_s: Above0 | None = None
    """Payload rate between this machine and the host, in the slower direction."""
    latency_s: Annotated[float, Meta(ge=0, lt=1e300)] | None = None
    """One-way latency: half of the round trip."""
    micro_batch: Positive | None = None
    host: bool = False
