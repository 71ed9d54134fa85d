"""A torch device that is not the CPU: it owns the backend "fake", so that staging is tested without hardware.

It must not know potluck beyond the Device interface. Its tensors are ordinary torch.Tensors on `fake:0`:
numpy() refuses them, and every operation that mixes them with CPU tensors raises, as on an accelerator.

How: torch's slot for outside backends (PrivateUse1) gets one fallback for all operations. The bytes lie in
host memory that torch knows only as the device's (a DLPack capsule of an "extension" device). The fallback
looks at these bytes as CPU tensors, runs the CPU's kernel, and copies the results into such memory. Views
are made by torch's own as_strided on the device's storage, so that they share it. The backward runs in a
thread of its own, as with CUDA. Not there: recurrent layers and copies to the CPU with non_blocking (both
raise), autocast's casts, random numbers of its own (they are the CPU's).

torch works with one accelerator a process: beside this one, a real one's backward fails. So where there is a
real one, tests of this one are skipped.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from potluck.device import Device, Memory
from potluck.device.pick import FACTORIES

NAME = "fake"
MEMORY_BYTES = 1 << 30
_HEADER_BYTES = 128  # the DLPack header, in front of the data; a multiple of 64 keeps these aligned
_DL_EXTENSION_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
_DL_UINT = 1
_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


class FakeDevice(Device):
    """The Device over the backend; `free_bytes` is what a test wants a search for micro-batches to see."""

    kind = NAME

    def __init__(self, free_bytes: int = MEMORY_BYTES) -> None:
        install()
        super().__init__(torch.device(NAME, 0), "fake device for tests")
        self._free_bytes = free_bytes

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().to("cpu")

    def from_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.torch_device)

    def memory(self) -> Memory:
        return Memory(total_bytes=MEMORY_BYTES, free_bytes=self._free_bytes)


def available() -> bool:
    """Whether this machine has no real accelerator, so that the fake one can take its place."""
    return not (torch.cuda.is_available() or torch.backends.mps.is_available())


def install() -> None:
    """Make `torch.device("fake")` and `pick("fake")` work in this process; a second call does nothing.

    Where there is a real accelerator, the calling test is skipped.
    """
    if _libraries:
        return
    if not available():
        pytest.skip("this machine has a real accelerator", allow_module_level=True)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_backend_module())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_run_on_cpu, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    _make_storages_cloneable()
    # Module.to() changes parameters in place only for backends it knows; for others it makes new ones, and so
    # unties tied weights. Swapping keeps the parameter objects, as on CUDA and MPS.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _libraries.extend((everything, aten))
    FACTORIES[NAME] = lambda argument: FakeDevice()


def _make_storages_cloneable() -> None:
    """copy.deepcopy() of a tensor asks torch's allocator of the device, and without one torch crashes."""
    of_torch = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != NAME:
            return of_torch(self)
        result = _allocate(self.nbytes()).untyped_storage()
        ctypes.memmove(result.data_ptr(), self.data_ptr(), self.nbytes())
        return result

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]


def _backend_module() -> ModuleType:
    """`torch.fake`: what torch asks of a backend's module. Random numbers are the CPU generator's."""
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    module = ModuleType(f"torch.{NAME}")
    module.__dict__.update(answers)
    return module


# -- memory --------------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    """DLManagedTensor of the DLPack ABI, flattened: a DLTensor, then its owner's context and deleter."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),  # ours: the one-dimensional shape, which `shape` points to
    )


_c = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
_c.malloc.restype, _c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _allocate(nbytes: int) -> Tensor:
    """uint8[nbytes] on the device.

    Header and data are one C allocation, so that free() can be its deleter: a deleter in Python would crash
    when the last tensor dies after the interpreter.
    """
    address = _c.malloc(_HEADER_BYTES + nbytes)
    header = _DLTensor.from_address(address)
    header.data = address + _HEADER_BYTES
    header.device_type, header.device_id, header.ndim = _DL_EXTENSION_DEVICE, 0, 1
    header.dtype_code, header.dtype_bits, header.dtype_lanes = _DL_UINT, 8, 1
    header.shape, header.length = address + _DLTensor.length.offset, nbytes
    header.strides, header.byte_offset, header.context = None, 0, None
    header.deleter = ctypes.cast(_c.free, ctypes.c_void_p).value
    return torch.utils.dlpack.from_dlpack(_new_capsule(address, b"dltensor", None))


def _seen_from_cpu(tensor: Tensor) -> Tensor:
    """The same bytes as a CPU tensor; valid only while `tensor` lives."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    usable = storage.nbytes() // tensor.itemsize * tensor.itemsize
    raw = (ctypes.c_ubyte * usable).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _cpu_kernel(op: Any, *args: Any) -> Any:
    """torch's own CPU kernel on the device's tensors: for those that touch sizes and storages but no data."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


def _moved_from_cpu(tensor: Tensor) -> Tensor:
    """A CPU result as a new tensor on the device, with the same sizes and strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    span = last + 1 if tensor.numel() else 0
    result = _allocate(span * tensor.itemsize).view(tensor.dtype)
    result = _cpu_kernel(torch.ops.aten.as_strided.default, result, tensor.shape, tensor.stride(), 0)
    _seen_from_cpu(result).copy_(tensor)
    return result


# -- operations ----------------------------------------------------------------------------------------------


def _on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of a value, or of each element of an argument that is a list."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(function(element) for element in value)
    return function(value)


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: its tensors seen from the CPU, the CPU's kernel, its results back on the device."""
    pairs: list[tuple[Tensor, Tensor]] = []  # (on the device, what the CPU's kernel gets for it)
    written: list[tuple[Tensor, Tensor]] = []  # those of them that are outputs
    outputs = {argument.name for argument in op._schema.arguments if argument.is_out}

    def lend(value: Any, is_output: bool = False) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not isinstance(value, Tensor):
            return value
        if not _on_device(value):
            if value.dim() == 0:  # a scalar, which accelerators take as well
                return value
            raise RuntimeError(f"{op}: expected all tensors on {NAME}:0, but found one on {value.device}")
        seen = _seen_from_cpu(value)
        if is_output:
            seen = seen.clone()  # kernels resize outputs, even to and fro
            written.append((value, seen))
        pairs.append((value, seen))
        return seen

    kernel = op
    for value, wanted in zip(args, op._schema.arguments):
        if isinstance(value, int | float) and str(wanted.type) == "Tensor":
            kernel = op.overloadpacket  # torch gives us `x & 15` as an overload for two tensors: choose anew
    lent = [_mapped(lend, value) for value in args]
    named = {name: _mapped(partial(lend, is_output=name in outputs), value) for name, value in kwargs.items()}
    results = kernel(*lent, **named)
    for ours, seen in written:
        if ours.shape == seen.shape:
            _seen_from_cpu(ours).copy_(seen)
        else:
            _take_over(ours, seen)
    return _mapped(lambda value: _given_back(value, pairs) if isinstance(value, Tensor) else value, results)


def _given_back(result: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What the device's caller gets for a CPU result: the argument itself, a view of it, or a new tensor."""
    for ours, seen in pairs:
        if result is seen:
            return ours
    if result.numel():
        for ours, seen in pairs:
            if seen.numel() and result.untyped_storage().data_ptr() == seen.untyped_storage().data_ptr():
                layout = (result.shape, result.stride(), result.storage_offset())
                return _cpu_kernel(torch.ops.aten.as_strided.default, ours, *layout)
    return _moved_from_cpu(result)


def _take_over(ours: Tensor, seen: Tensor) -> None:
    moved = _moved_from_cpu(seen)
    _set_storage(ours, moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride())


def _set_storage(ours: Tensor, storage: torch.UntypedStorage, *layout: Any) -> Tensor:
    return _cpu_kernel(torch.ops.aten.set_.source_Storage_storage_offset, ours, storage, *layout)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Every copy to, from and within the device: the only operation that may see both sides."""
    there, here = (_seen_from_cpu(t) if _on_device(t) else t for t in (target, source))
    there.copy_(here)
    return target


def _convolution(*args: Any) -> Tensor:
    return _run_on_cpu(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, image: Tensor, weight: Tensor, *settings: Any) -> Any:
    transposed, groups = settings[3], settings[5]
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    op = torch.ops.aten.convolution_backward.default
    return _run_on_cpu(op, grad, image, weight, [channels], *settings)


_KERNELS: dict[str, Callable[..., Any]] = {  # what torch asks of an outside backend by name
    "_copy_from": _copy_from,
    "set_.source_Storage_storage_offset": _set_storage,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
