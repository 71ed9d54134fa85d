"""Codecs: how a piece of float32 values is compressed for sending.

    __init__.py    the public names, lazily: NAMES can be read without importing torch
    names.py       the names of the codecs, and the error for an unknown one
    registry.py    from a name to a codec
    interface.py   the contract that every codec keeps
    tensors.py     what the codecs share: checks, views of bytes as numbers, work in parts that fit the cache
    none.py        float32 unchanged, 4 bytes per value
    half.py        fp16 and bf16, 2 bytes per value
    block.py       int8 and int4 with a scale for every 128 values, 1.016 and 0.516 bytes per value
    fused.py       int8 and int4 on a GPU in one pass, with the Triton kernels of kernels.py
    thin.py        4-bit codes with steps of a block's root mean square, which leave few bits after entropy coding
    entropy.py     from a payload to the bytes that are sent, and back: entropy coding for thin
    coder.py       the entropy coder: Huffman codes by zstandard
    changes.py     exact changes of weights for guests that compute in bf16
    topk.py        the largest values by magnitude, 6 bytes for each one kept
    cached.py      int8 and int4 for a sum of two on a CPU, in the fewest passes over memory
    feedback.py    error feedback, and a replica that follows its target

Every codec is stateless, takes tensors of any device, and runs on the calling thread alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from potluck.codec.names import NAMES, down_of

if TYPE_CHECKING:
    from potluck.codec.entropy import from_wire, is_entropy_coded, least_and_most_bytes, to_wire
    from potluck.codec.feedback import add_decoded, encode_change, encode_with_feedback, rehearse
    from potluck.codec.interface import Codec
    from potluck.codec.registry import Codecs, get

__all__ = [
    "NAMES",
    "Codec",
    "Codecs",
    "add_decoded",
    "down_of",
    "encode_change",
    "encode_with_feedback",
    "from_wire",
    "get",
    "is_entropy_coded",
    "least_and_most_bytes",
    "rehearse",
    "to_wire",
]

_HOME = {
    "Codec": "interface",
    "Codecs": "registry",
    "add_decoded": "feedback",
    "encode_change": "feedback",
    "encode_with_feedback": "feedback",
    "from_wire": "entropy",
    "is_entropy_coded": "entropy",
    "get": "registry",
    "least_and_most_bytes": "entropy",
    "rehearse": "feedback",
    "to_wire": "entropy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
