"""Encodes batches: owns how a nested dict, list or tuple with tensors becomes JSON and raw frames.

No code in the bytes is ever run (no pickle).

The spec has scalars as in JSON, and everything else as a tagged list:

    ["l", item...]   ["t", item...]   ["d", [key, value]...]   ["f", "nan" | "inf" | "-inf"]
    ["x", dtype, shape]   a tensor: its bytes (C order, little-endian) are the next ones of the frames
    ["@", n]              only as the whole spec: the first n bytes of the frames are the real spec

All frames together are one stream; tensors follow one another in it without gaps, so that one tensor can
span frames and many small ones can share a frame.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from potluck.errors import LoopError, WireError
from potluck.wire.frames import MAX_DEPTH, MAX_FRAME_BYTES, MAX_FRAMES, dump_json, load_json

MAX_TREE_BYTES = MAX_FRAMES * MAX_FRAME_BYTES // 2
"""Default limit: half of one message, so that there is room for other frames."""

_INLINE_SPEC_BYTES = 8 * 1024
_MAX_SPEC_BYTES = MAX_FRAME_BYTES
_MAX_VIEWS = MAX_FRAMES // 2
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**48
_MAX_INT_BITS = 4096
_MAX_TREE_DEPTH = MAX_DEPTH // 2 - 4
"""A dict takes two levels of JSON, and the header around the spec a few."""

_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 complex128 complex64 complex32 bool "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
# Older versions of torch lack some of the small ones.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def pack_tree(tree: Any, *, max_bytes: int = MAX_TREE_BYTES) -> tuple[Any, list[memoryview]]:
    """The spec of a batch and its bytes.

    Frames may be views of the tensors' own memory: do not change those tensors until the frames are sent. LoopError
    names the place in the batch of a value that cannot be sent. Named tuples are sent as plain tuples, mappings as
    dicts.
    """
    if sys.byteorder != "little":
        raise LoopError("batches can be sent only between little-endian machines, and this one is not")
    tensors: list[torch.Tensor] = []
    spec = _spec_of(tree, "batch", 0, tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    text = dump_json(spec)
    if len(text) > _MAX_SPEC_BYTES or total + len(text) > max_bytes:
        raise LoopError(
            f"a batch of {total + len(text):,} bytes is too large to send, at most {max_bytes:,} travel",
            hint='use a smaller micro-batch, or data="local" so that samples stay on each machine',
        )
    views = [_bytes_of(tensor) for tensor in tensors if tensor.nbytes]
    if len(text) > _INLINE_SPEC_BYTES:
        spec = ["@", len(text)]
        views.insert(0, memoryview(text))
    frames = [piece for view in views for piece in split_frames(view)]
    return spec, frames if len(frames) <= _MAX_VIEWS else _joined(views)


def unpack_tree(spec: Any, frames: Sequence[bytes | memoryview], *, max_bytes: int = MAX_TREE_BYTES) -> Any:
    """The batch of a spec and its bytes. Its tensors are on the CPU, with their own memory.

    Raises WireError for anything invalid. A tensor is allocated only after its bytes have arrived.
    """
    stream = _ByteStream(frames)
    if stream.left > max_bytes:
        raise WireError(f"a batch of {stream.left} bytes, at most {max_bytes} are taken")
    if isinstance(spec, list) and len(spec) == 2 and spec[0] == "@":
        size = spec[1]
        if not _is_count(size) or size > min(stream.left, _MAX_SPEC_BYTES):
            raise WireError("a batch whose description is longer than what arrived")
        text = bytearray(size)
        stream.read_into(memoryview(text))
        spec = load_json(bytes(text))
    tree = _tree_of(spec, stream, 0)
    if stream.left:
        raise WireError(f"a batch with {stream.left} bytes that belong to nothing")
    return tree


def split_frames(view: memoryview, max_frame_bytes: int = MAX_FRAME_BYTES) -> list[memoryview]:
    """Views of `view` that each fit into a frame; nothing is copied."""
    view = view.cast("B") if view.nbytes else memoryview(b"")
    return [view[start : start + max_frame_bytes] for start in range(0, view.nbytes, max_frame_bytes)]


def _joined(views: Iterable[memoryview]) -> list[memoryview]:
    """The same stream in as few frames as possible, because many small tensors would exceed the limit of frames."""
    return split_frames(memoryview(b"".join(views)))


def _spec_of(node: Any, path: str, depth: int, tensors: list[torch.Tensor]) -> Any:
    if depth > _MAX_TREE_DEPTH:
        raise LoopError(f"{path} is nested too deeply to send")
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, str):
        return _text(node, path)
    if isinstance(node, torch.Tensor):
        return _tensor_spec(node, path, tensors)
    if isinstance(node, numbers.Integral):
        return _integer(int(node), path)
    if isinstance(node, numbers.Real):
        value = float(node)
        return value if math.isfinite(value) else ["f", str(value)]
    if isinstance(node, Mapping):
        pairs = [
            [_key(key, path), _spec_of(item, f"{path}[{key!r}]", depth + 1, tensors)] for key, item in node.items()
        ]
        return ["d", *pairs]
    if isinstance(node, (list, tuple)):
        items = [_spec_of(item, f"{path}[{i}]", depth + 1, tensors) for i, item in enumerate(node)]
        return ["l" if isinstance(node, list) else "t", *items]
    raise LoopError(
        f"{path} is a {_type_name(node)}, which cannot be sent to a guest",
        hint="a batch may hold tensors, numbers, strings, None, dicts, lists and tuples; "
        "turn the rest into tensors in the data set or in collate_fn",
    )


def _type_name(node: Any) -> str:
    kind = type(node)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise LoopError(f"{path} is a string with broken characters, which cannot be sent") from None
    return str.__str__(value)  # of a str subclass the value, whatever its own __str__ says


def _integer(value: int, path: str) -> int:
    if value.bit_length() > _MAX_INT_BITS:
        raise LoopError(f"{path} is an integer of {value.bit_length()} bits, too large to send")
    return value


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str):
        return _text(key, path)
    if key is None or type(key) is bool or (type(key) is float and math.isfinite(key)):
        return key
    if type(key) is int:
        return _integer(key, path)
    raise LoopError(
        f"{path} has a key of type {_type_name(key)}, which cannot be sent to a guest",
        hint="use strings or numbers as keys",
    )


def _tensor_spec(tensor: torch.Tensor, path: str, tensors: list[torch.Tensor]) -> list[Any]:
    name = _NAMES.get(tensor.dtype)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta" or name is None:
        raise LoopError(
            f"{path} is a tensor that cannot be sent to a guest "
            f"({tensor.dtype}, {tensor.layout}, on {tensor.device})",
            hint="only dense tensors with data can be sent; call .to_dense() or pad first",
        )
    tensors.append(tensor)
    return ["x", name, list(tensor.shape)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    view = plain.reshape(-1).view(torch.uint8).numpy().data
    return view.cast("B")


class _ByteStream:
    """All frames as one sequence of bytes, read from the beginning."""

    def __init__(self, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self._views = [view.cast("B") for frame in frames if (view := memoryview(frame)).nbytes]
        except (TypeError, ValueError):
            raise WireError("a batch whose frames are not bytes") from None
        self._views.reverse()
        self.left = sum(view.nbytes for view in self._views)

    def read_into(self, target: memoryview) -> None:
        """Fill `target`. The caller has checked that enough bytes are left."""
        filled = 0
        while filled < target.nbytes:
            view = self._views.pop()
            part = view[: target.nbytes - filled]
            target[filled : filled + part.nbytes] = part
            filled += part.nbytes
            if part.nbytes < view.nbytes:
                self._views.append(view[part.nbytes :])
        self.left -= filled


def _tree_of(spec: Any, stream: _ByteStream, depth: int) -> Any:
    if spec is None or isinstance(spec, (bool, int, float, str)):
        return spec
    if not isinstance(spec, list) or not spec or depth > MAX_DEPTH:
        raise WireError("the description of a batch is malformed")
    tag, rest = spec[0], spec[1:]
    if tag == "l":
        return [_tree_of(item, stream, depth + 1) for item in rest]
    if tag == "t":
        return tuple(_tree_of(item, stream, depth + 1) for item in rest)
    if tag == "d":
        return dict(_pair_of(pair, stream, depth + 1) for pair in rest)
    if tag == "x" and len(rest) == 2:
        return _tensor_of(rest[0], rest[1], stream)
    if tag == "f" and len(rest) == 1 and isinstance(rest[0], str) and rest[0] in _NON_FINITE:
        return _NON_FINITE[rest[0]]
    raise WireError("the description of a batch has an unknown part")


def _pair_of(pair: Any, stream: _ByteStream, depth: int) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], (list, dict)):
        raise WireError("the description of a batch has a malformed pair")
    return pair[0], _tree_of(pair[1], stream, depth)


def _tensor_of(name: Any, shape: Any, stream: _ByteStream) -> torch.Tensor:
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise WireError("a tensor of an unknown dtype", hint="is torch on both machines of the same version?")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise WireError("a tensor whose shape is not a list of sizes")
    # Zero-sized dimensions must not hide absurd ones: torch multiplies the others for the strides.
    if math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise WireError("a tensor of an impossible shape")
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes > stream.left:
        raise WireError(f"a tensor of {size_bytes} bytes where {stream.left} bytes are left")
    flat = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes:
        stream.read_into(flat.numpy().data)
    # Any byte but 0 and 1 in a bool tensor is undefined behaviour in torch's kernels.
    typed = flat.ne(0) if dtype == torch.bool else flat.view(dtype)
    return typed.reshape(shape)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
