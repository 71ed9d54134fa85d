"""Known workloads by name: parameters, FLOPs and activations of a sample.

PURE.

A token costs 6·P FLOPs (a third of them in the forward) and, in a transformer of L layers of width h with s
tokens in a sample, 12·L·h·s more for attention. Activations of a sample in 16 bits, with attention that keeps no
s×s matrix: 34·s·h·L bytes. Other models count as 6·P FLOPs a token."""

from __future__ import annotations

import math
import re

from msgspec import Struct

from potluck.checked import nearest
from potluck.errors import ConfigError
from potluck.plan import about
from potluck.spec.fleet import FP32_BYTES, Job
from potluck.spec.rig import Workload

GPT2_VOCABULARY = 50_257
GPT2_SEQUENCE = 1024
DEFAULT_BATCH_TOKENS = 524_288
MOST_PARAMETERS = 1e13
ACTIVATION_BYTES = 34
_GPT2 = {"gpt2-124m": (12, 768), "gpt2-350m": (24, 1024), "gpt2-760m": (36, 1280), "gpt2-1.5b": (48, 1600)}
"""Layers and width by name; the parameters are computed from them."""
NAMES = (*_GPT2, "gpt", "cnn")
_CNN_FLOPS = 6 * 1.92e6
"""FLOPs of a sample of 8 × 8 pixels: 1.92 M multiplications forward, counted from the layers' shapes."""


class Model(Struct, frozen=True, kw_only=True):
    """A workload before its batch is known."""

    name: str
    parameters: int
    flops_per_sample: float
    tokens_per_sample: int
    activation_bytes_per_sample: float | None = None

    def job(self, batch: int, codec: str = "int4", bytes_per_parameter: float = FP32_BYTES) -> Job:
        return Job(
            name=self.name,
            parameters=self.parameters,
            batch=batch,
            tokens_per_sample=self.tokens_per_sample,
            codec=codec,
            activation_bytes_per_sample=self.activation_bytes_per_sample,
            bytes_per_parameter=bytes_per_parameter,
        )


def find(name: str, sequence: int | None = None) -> Model:
    """gpt2-124m … gpt2-1.5b, gpt:DEPTH (our recipe), cnn, or a number of parameters: 350M, 7e9."""
    if sequence is not None and not 1 <= sequence <= 1 << 24:
        raise ConfigError(f"a sample of {sequence} tokens", hint="--sequence takes 1 or more, for example 1024")
    plain = name.strip().lower().replace(" ", "").replace("gpt-2", "gpt2")
    if plain in _GPT2:
        layers, width = _GPT2[plain]
        count = layers * (12 * width + 13) * width + width * (GPT2_VOCABULARY + GPT2_SEQUENCE + 2)
        return _transformer(name, count, layers, width, sequence or GPT2_SEQUENCE)
    family, _, depth = plain.partition(":")
    if family == "gpt":
        return _recipe(name, depth, sequence)
    if plain == "cnn":
        count = about.parameters(Workload(recipe="cnn"))
        return Model(name="cnn", parameters=count, flops_per_sample=_CNN_FLOPS, tokens_per_sample=1)
    count_of = _number(plain)
    if count_of is None:
        raise ConfigError(
            f"there is no model {name!r}", hint=nearest(plain, [*NAMES]) + "; or parameters: 350M, 7e9; gpt:12"
        )
    tokens = sequence or GPT2_SEQUENCE
    return Model(
        name=f"{name} parameters",
        parameters=count_of,
        flops_per_sample=6.0 * count_of * tokens,
        tokens_per_sample=tokens,
    )


def batch_of(model: Model, batch_tokens: int | None, batch: int | None) -> int:
    """Samples per step, given directly or as tokens."""
    if batch is not None and batch_tokens is not None:
        raise ConfigError("both --batch and --batch-tokens", hint="give one of them")
    if batch is None:
        tokens = DEFAULT_BATCH_TOKENS if batch_tokens is None else batch_tokens
        if tokens < model.tokens_per_sample:
            raise ConfigError(
                f"a batch of {tokens} tokens is less than one sample of {model.tokens_per_sample}",
                hint=f"--batch-tokens must be {model.tokens_per_sample} or more, or --sequence smaller",
            )
        batch = tokens // model.tokens_per_sample
    if not 1 <= batch <= 10_000_000:
        raise ConfigError(f"a batch cannot have {batch} samples", hint="choose 1 to 10,000,000")
    return batch


def _recipe(name: str, depth: str, sequence: int | None) -> Model:
    if depth and not (depth.isascii() and depth.isdecimal() and 1 <= int(depth) <= 1000):
        raise ConfigError(f"there is no model {name!r}", hint="gpt:12 is the recipe gpt of depth 12")
    workload = Workload(recipe="gpt", depth=int(depth) if depth else None, sequence=sequence)
    layers, tokens = workload.depth or about.GPT_DEPTH, sequence or about.GPT_SEQUENCE
    return _transformer(f"gpt depth {layers}", about.parameters(workload), layers, 64 * layers, tokens)


def _transformer(name: str, parameters: int, layers: int, width: int, tokens: int) -> Model:
    return Model(
        name=name,
        parameters=parameters,
        flops_per_sample=tokens * (6.0 * parameters + 12.0 * layers * width * tokens),
        tokens_per_sample=tokens,
        activation_bytes_per_sample=float(ACTIVATION_BYTES * tokens * width * layers),
    )


def _number(word: str) -> int | None:
    found = re.match(r"^([0-9.]+(?:e[0-9]+)?)([kmb]?)$", word)
    if found is None:
        return None
    try:
        value = float(found[1]) * {"k": 1e3, "m": 1e6, "b": 1e9, "": 1}[found[2]]
    except ValueError:
        return None
    return round(value) if math.isfinite(value) and 1 <= value <= MOST_PARAMETERS else None
