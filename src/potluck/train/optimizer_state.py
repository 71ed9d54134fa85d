"""Owns how the state of optimizers, schedulers and random generators is converted to JSON and named tensors.

The caller stores the JSON and the tensors.

A value that JSON lacks is an object with one key that starts with a dollar sign:
`$tensor` (a name), `$tuple`, `$dict` (pairs; for keys that are no strings), `$counter`, `$float` (nan, inf).
"""

from __future__ import annotations

import base64
import math
import random
import struct
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from potluck.bounds import Finite, Named, Natural, Text
from potluck.errors import UserError

# What both torch and the safetensors format know; complex128 and quantised numbers are not among them.
STORABLE_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "bool", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
    if hasattr(torch, name)
)


MOST_BITS = 8192
"""Longer numbers cannot be written: Python refuses to make text of more than 4,300 digits."""

if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
else:
    Json = Any
"""What flatten() makes of a state_dict. What JSON decodes to is nothing else; msgspec knows no recursive type."""


class RngState(Struct, frozen=True, kw_only=True):
    """States of random generators, as JSON."""

    python: tuple[Natural, Text, Finite | None]
    """Python's version of the format, the generator's words, and the second number of the last gauss()."""
    numpy: Json
    torch: Text
    devices: Named[Text]


class Stateful(Protocol):
    """Something that can be saved with a run: a scheduler, a scaler, an average of the weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def flatten(tree: Any, path: str, tensors: dict[str, Tensor] | None, *, of: str) -> Json:
    """`tree` as JSON. Its tensors are added to `tensors` under their dotted paths (None: tensors are not allowed).

    Raises UserError for a value that a checkpoint cannot hold, naming its key and its owner `of`.
    """
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if isinstance(tree, int):
        if tree.bit_length() > MOST_BITS:
            raise _cannot_hold(path, of, f"a number of {tree.bit_length()} bits")
        return int(tree)
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {"$float": repr(float(tree))}
    if isinstance(tree, Tensor) and tensors is not None:
        check_storable(tree, path, of=of)
        return {"$tensor": _add(tensors, path, tree)}
    if isinstance(tree, Mapping):
        return _flatten_mapping(tree, path, tensors, of)
    if isinstance(tree, (list, tuple)):
        items = [flatten(item, _join(path, i), tensors, of=of) for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"$tuple": items}
    raise _cannot_hold(path, of, f"of type {type(tree).__qualname__}")


def unflatten(json_tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of flatten()."""
    if isinstance(json_tree, list):
        return [unflatten(item, tensors) for item in json_tree]
    if not isinstance(json_tree, dict):
        return json_tree
    if len(json_tree) == 1:
        key = next(iter(json_tree))
        value: Any = json_tree[key]
        if key == "$tensor":
            return tensors[value]
        if key == "$tuple":
            return tuple(unflatten(item, tensors) for item in value)
        if key == "$float":
            return float(value)
        if key in ("$dict", "$counter"):
            pairs = {name: unflatten(item, tensors) for name, item in value}
            return Counter(pairs) if key == "$counter" else pairs
    return {key: unflatten(value, tensors) for key, value in json_tree.items()}


def check_storable(tensor: Tensor, path: str, *, of: str) -> None:
    """Raise UserError for a tensor that no checkpoint can hold."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _cannot_hold(path, of, f"a tensor of layout {tensor.layout}")
    if tensor.device.type == "meta":
        raise _cannot_hold(path, of, "a tensor without data, on the device meta")
    if tensor.dtype not in STORABLE_DTYPES:
        raise _cannot_hold(path, of, f"a tensor of {tensor.dtype}")


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """load_state_dict(), but with every tensor in the number format in which it was saved."""
    saved = {index: dict(entry) for index, entry in state["state"].items() if isinstance(entry, dict)}
    optimizer.load_state_dict(state)
    # torch casts state to its parameter's format: an fp32 average of a bf16 weight would lose its low bits.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in saved.items():
        loaded = optimizer.state.get(parameters[index], {}) if isinstance(index, int) else {}
        for key, value in entry.items():
            present = loaded.get(key)
            if isinstance(value, Tensor) and isinstance(present, Tensor) and present.dtype != value.dtype:
                loaded[key] = value.to(present.device)


def capture_rng(device_rng: Mapping[str, Tensor]) -> RngState:
    """The states of Python's, numpy's, torch's and the devices' random generators, as JSON."""
    version, words, gauss = random.getstate()
    return RngState(
        python=(version, _text(struct.pack(f"<{len(words)}I", *words)), gauss),
        numpy=_arrays_to_text(np.random.get_state(legacy=False)),
        torch=_text(torch.get_rng_state().numpy().tobytes()),
        devices={name: _text(state.cpu().numpy().tobytes()) for name, state in device_rng.items()},
    )


def restore_rng(saved: RngState) -> None:
    """Restore Python's, numpy's and torch's CPU generators to the states that capture_rng() saved."""
    version, text, gauss = saved.python
    words = base64.b64decode(text)
    random.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    np.random.set_state(_text_to_arrays(saved.numpy))
    torch.set_rng_state(_bytes_tensor(saved.torch))


def device_rng(saved: RngState) -> dict[str, Tensor]:
    """The devices' states in the result of capture_rng()."""
    return {name: _bytes_tensor(text) for name, text in saved.devices.items()}


def _flatten_mapping(tree: Mapping[Any, Any], path: str, tensors: dict[str, Tensor] | None, of: str) -> Json:
    for key in tree:
        if key is not None and not isinstance(key, (str, int, float)):
            raise _cannot_hold(path, of, f"a dict with a key of type {type(key).__qualname__}")
    pairs = [(key, flatten(value, _join(path, key), tensors, of=of)) for key, value in tree.items()]
    if isinstance(tree, Counter):
        return {"$counter": [list(pair) for pair in pairs]}
    if all(isinstance(key, str) and not key.startswith("$") for key in tree):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _add(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> str:
    """A name for the tensor: its path, or the path with a number if a key with a dot has taken that."""
    name, number = path, 2
    while name in tensors:
        name, number = f"{path}~{number}", number + 1
    tensors[name] = tensor
    return name


def _cannot_hold(path: str, of: str, what: str) -> UserError:
    return UserError(
        f"a checkpoint cannot hold {path!r} of {of}: it is {what}",
        hint="it holds numbers, strings, None, lists, tuples, dicts and dense tensors; of an object with "
        "state_dict() and load_state_dict(), what state_dict() gives",
    )


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _arrays_to_text(state: Any) -> Json:
    if isinstance(state, Mapping):
        return {key: _arrays_to_text(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"$array": [state.dtype.str, _text(state.tobytes())]}
    plain: Json = state.item() if isinstance(state, np.generic) else state
    return plain


def _text_to_arrays(saved: Json) -> Any:
    if not isinstance(saved, dict):
        return saved
    if "$array" in saved:
        array: Any = saved["$array"]
        dtype, text = array
        return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype))
    return {key: _text_to_arrays(value) for key, value in saved.items()}
