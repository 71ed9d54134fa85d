"""Owns checkpoints of a training: what is kept, how it is written beside the training, how it is put back.

What a run wants kept beside the tensors comes as `extra` and is given back unchanged.

    checkpoints/step-00000100/weights-000.safetensors    the model's state_dict, for any safetensors reader
                              optimizer-000.safetensors  the optimizer's tensors: state.<index>.<key>
                              objects-000.safetensors    tensors of the scheduler and other objects, if any
                              manifest.json              everything else, and the hash of every file
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from potluck import checked
from potluck.codec.tensors import all_finite
from potluck.durable import sync
from potluck.errors import CheckpointError, NonFiniteError, RunFolderError
from potluck.failpoints import hit
from potluck.train import checkpoint_folder, optimizer_state, script_state
from potluck.train.beginning import MOST_BUFFER_BYTES
from potluck.train.optimizer_state import Stateful
from potluck.train.script_state import ScriptState

SHARD_BYTES = 256_000_000
"""Tensors are copied and written in groups of at most this size, so that the copy in memory stays small."""

_SAME_AS = "same as "
_NOT_AS_WRITTEN = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    SafetensorError,
)
"""What reading a manifest or a file raises that this module did not write."""

Described = str | list[Any]
"""A tensor's number format and shape, or a text: of a tied tensor, whose memory it shares."""


class _WeightsEntry(TypedDict):
    tensors: dict[str, Described]
    other: dict[str, Any]
    """What the model's state has besides tensors."""


class _OptimizerEntry(TypedDict):
    parts: dict[str, Described | int]
    state: Any


class _StateEntry(TypedDict):
    values: dict[str, Any]
    objects: dict[str, Any]


class ManifestEntries(TypedDict):
    """What a checkpoint's manifest says besides its files: JSON, in which tensors are names."""

    weights: _WeightsEntry
    optimizer: _OptimizerEntry
    objects: dict[str, Any]
    state: NotRequired[_StateEntry]
    """`run.state`; an older version wrote none."""
    rng: optimizer_state.RngState
    extra: dict[str, Any]


class CheckpointManifest(ManifestEntries):
    step: int
    files: dict[str, checkpoint_folder.FileEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What to keep, as live objects: nothing here is a copy."""

    step: int
    """Updates made."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    finite: Collection[str] | None = None
    """Names in the model's state that must be finite, or nothing is written, nor removed for it; all trained ones
    where that is not said. The optimizer's state always must."""

    objects: Mapping[str, Stateful] = field(default_factory=dict)
    """Whatever else has a state_dict(): the scheduler, a scaler, an average of the weights."""

    device_rng: Mapping[str, Tensor] = field(default_factory=dict)
    """States of the devices' random generators; Python's, numpy's and torch's own are always kept."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """The script's own values, `run.state`."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Anything JSON can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint whose every hash was right."""

    step: int
    extra: dict[str, Any]
    path: Path

    skipped: tuple[tuple[Path, str], ...]
    """Newer checkpoints that are damaged, and why."""

    device_rng: dict[str, Tensor]
    """For the device layer to put back."""

    manifest: CheckpointManifest = field(repr=False)

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objects: Mapping[str, Stateful],
        state: ScriptState | None = None,
    ) -> None:
        """Put everything back, the random generators last; what does not fit is found before that.

        `state`: the script's own, whose values are replaced by those that were saved.
        """
        saved = self.manifest
        self._compare(saved["weights"]["tensors"], _describe(model.state_dict()), "the model's {}")
        self._compare(saved["optimizer"]["parts"], _parts(optimizer, model), "the optimizer's {}")
        self._compare(
            dict.fromkeys(saved["objects"], "present"), dict.fromkeys(objects, "present"), "the object {}"
        )
        if state is not None:
            self._check_state(state)
        weights, tree, states = self._read()
        model.load_state_dict(weights, strict=True)
        try:
            optimizer_state.load_optimizer(optimizer, tree)
        except _NOT_AS_WRITTEN as error:
            raise self._forged(error) from error
        for name, target in objects.items():
            try:
                target.load_state_dict(states[name])
            except _NOT_AS_WRITTEN as error:
                raise self._misfit(f"the object {name} cannot take its state ({error!r})") from error
        if state is not None:
            self._restore_state(state)
        self.restore_rng()

    @property
    def _own_state(self) -> _StateEntry:
        return self.manifest.get("state", _StateEntry(values={}, objects={}))

    def _check_state(self, state: ScriptState) -> None:
        try:
            why = script_state.misfit(state, self._own_state)
        except _NOT_AS_WRITTEN as error:
            raise self._forged(error) from error
        if why:
            raise self._misfit(why)

    def _restore_state(self, state: ScriptState) -> None:
        saved = self._own_state
        tensors = {name: tensor.clone() for name, tensor in self._tensors("objects").items()}
        try:
            state.update(optimizer_state.unflatten(saved["values"], tensors))
        except _NOT_AS_WRITTEN as error:
            raise self._forged(error) from error
        for key, each in saved["objects"].items():
            try:
                state[key].load_state_dict(optimizer_state.unflatten(each, tensors))
            except (*_NOT_AS_WRITTEN, RuntimeError) as error:  # a module's says in words what differs
                raise self._misfit(f"run.state[{key!r}] cannot take its state ({error})") from error

    def _read(self) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """The states of the model, the optimizer and the objects."""
        saved, unflatten = self.manifest, optimizer_state.unflatten
        try:
            weights: dict[str, Any] = dict(self._tensors("weights"))
            for name, description in saved["weights"]["tensors"].items():
                if isinstance(description, str):
                    weights[name] = weights[description.removeprefix(_SAME_AS)]
            # Clones: a tensor mapped from the file would be lost when the checkpoint is removed.
            others = {name: tensor.clone() for name, tensor in self._tensors("objects").items()}
            weights.update(unflatten(saved["weights"]["other"], others))
            state = {name: tensor.clone() for name, tensor in self._tensors("optimizer").items()}
            tree = unflatten(saved["optimizer"]["state"], state)
            return weights, tree, {name: unflatten(each, others) for name, each in saved["objects"].items()}
        except _NOT_AS_WRITTEN as error:
            raise self._forged(error) from error

    def _forged(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path / checkpoint_folder.MANIFEST} has the right hash but was not written by potluck "
            f"({type(error).__name__}: {error})",
            hint="bring the folder back from a copy, or start a new run",
            step=self.step,
        )

    def restore_rng(self) -> None:
        """Python's, numpy's and torch's CPU generators as they were; restore() ends with this."""
        try:
            optimizer_state.restore_rng(self.manifest["rng"])
        except (*_NOT_AS_WRITTEN, RuntimeError, struct.error) as error:
            raise self._forged(error) from error

    def _compare(self, saved: Mapping[str, Any], here: Mapping[str, Any], what: str) -> None:
        for name in (*saved, *here):
            there, now = saved.get(name, "missing"), here.get(name, "missing")
            if there != now:
                raise self._misfit(f"{what.format(name)} is {there} there and {now} here")

    def _misfit(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} does not fit: {why}",
            hint="resume with the model, optimizer and settings that the run was started with",
            step=self.step,
        )

    def _tensors(self, kind: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in self.manifest["files"]:
            if name.startswith(f"{kind}-"):
                tensors.update(load_file(self.path / name))
        return tensors


class CheckpointWriter:
    """Writes checkpoints beside training, in a thread of its own.

    Weights and optimizer state change only in optimizer.step(), so the thread reads them while the next step
    is being computed; before_update() copies what it has not read by then. On an accelerator the reads are
    queued on the default stream, behind the update that start() follows.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        on_saved: Callable[[int, Path, float], None] | None = None,
        on_failed: Callable[[int, RunFolderError], None] = lambda step, error: None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """All are called in the thread: `before()` it writes, `on_saved(step, path, seconds)` when all is done, and
        `on_failed(step, error)` where the disk did not take it (it is full, or gone)."""
        self._folder = folder
        self._keep = keep
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._before = before
        self._thread: threading.Thread | None = None
        self._unread: list[_Slot] = []
        self._failure: BaseException | None = None

    def start(self, snapshot: Snapshot) -> bool:
        """Begin to write; False while the last one is still being written. Raises the last one's failure, unless
        the disk failed: that has been told, and this is the next attempt."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self.settle()
        image = _capture(snapshot)
        self._unread = [slot for slots in image.tensors.values() for slot in slots.values()]
        self._thread = threading.Thread(target=self._write, args=(image,), name="potluck-checkpoint")
        self._thread.start()
        return True

    def before_update(self) -> float:
        """Call just before optimizer.step(): copies what is not read yet; returns the seconds that took."""
        began = time.perf_counter()
        for slot in self._unread:
            slot.read()
        self._unread = []
        return time.perf_counter() - began

    def settle(self) -> None:
        """Until the one in progress has ended. A failure of the disk has been told and ends nothing."""
        with contextlib.suppress(RunFolderError):
            self.wait()

    def wait(self) -> None:
        """Until the one in progress is on the disk; raises its failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._unread = []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """The same as wait(): the thread lives only as long as a checkpoint is being written."""
        self.wait()

    def _write(self, image: _Image) -> None:
        began = time.monotonic()
        try:
            if self._before is not None:
                self._before()
            path = checkpoint_folder.publish(self._folder, image.step, image.write, keep=self._keep)
            hit("checkpoint.before-acknowledge")
            if self._on_saved is not None:
                self._on_saved(image.step, path, time.monotonic() - began)
            hit("checkpoint.acknowledged")
        except BaseException as error:  # raised in the training thread, by wait() or the next start()
            self._failure = error
            if isinstance(error, RunFolderError):
                self._on_failed(image.step, error)


def save(folder: Path, snapshot: Snapshot, *, keep: int = 2) -> Path:
    """Write a checkpoint now and return its folder; all but the last `keep` are removed."""
    image = _capture(snapshot)
    return checkpoint_folder.publish(folder, image.step, image.write, keep=keep)


def load_latest(folder: Path) -> Loaded | None:
    """The newest checkpoint that is whole; None where there is none at all."""
    skipped: list[tuple[Path, str]] = []
    for path in checkpoint_folder.newest_first(folder):
        try:
            return _loaded(path, checkpoint_folder.verified(path), tuple(skipped))
        except checkpoint_folder.DamagedError as damage:
            skipped.append((path, str(damage)))
    if not skipped:
        return None
    reasons = "; ".join(f"{path.name}: {why}" for path, why in skipped)
    raise CheckpointError(
        f"no checkpoint in {folder} can be read: {reasons}",
        hint="bring the folder back from a copy, or start a new run",
    )


def _loaded(path: Path, raw: dict[str, Any], skipped: tuple[tuple[Path, str], ...]) -> Loaded:
    """The checkpoint of this manifest, which another program may have written."""
    try:
        manifest = checked.as_kind(raw, CheckpointManifest)
        return Loaded(
            step=manifest["step"],
            extra=dict(optimizer_state.unflatten(manifest["extra"], {})),
            path=path,
            skipped=skipped,
            device_rng=optimizer_state.device_rng(manifest["rng"]),
            manifest=manifest,
        )
    except _NOT_AS_WRITTEN as error:
        what = f"{checkpoint_folder.MANIFEST} lacks what a checkpoint has ({type(error).__name__}: {error})"
        raise checkpoint_folder.DamagedError(what) from error


class _Slot:
    """A tensor on its way into a file: live, then copied by whichever thread needs it first, then gone."""

    def __init__(self, tensor: Tensor) -> None:
        self.size_bytes = tensor.nbytes
        self._lock = threading.Lock()
        self._live: Tensor | None = tensor.detach()
        self._copy: Tensor | None = None

    def read(self) -> Tensor | None:
        """The copy, made now if it was not yet; None after release()."""
        with self._lock:
            if self._live is not None:
                self._copy = _copied(self._live)
                self._live = None
            return self._copy

    def release(self) -> None:
        with self._lock:
            self._live = self._copy = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """A checkpoint before it is written: its small parts as JSON, its tensors as slots by kind of file."""

    step: int
    entries: ManifestEntries
    tensors: dict[str, dict[str, _Slot]]
    finite: Mapping[str, Collection[str]]
    """Names of tensors that must be, by kind of file."""

    def write(self, folder: Path) -> dict[str, Any]:
        """Files into `folder`, one group of tensors in memory at a time; returns the manifest's entries."""
        files: dict[str, checkpoint_folder.FileEntry] = {}
        for kind, slots in self.tensors.items():
            for number, shard in enumerate(_shards(slots, always=kind != "objects")):
                file = folder / f"{kind}-{number:03d}.safetensors"
                copies = {name: copy for name, slot in shard.items() if (copy := slot.read()) is not None}
                self._check(kind, copies)
                _write_shard(file, shard, copies)
                files[file.name] = checkpoint_folder.fingerprint(file)
        return {"files": files, **self.entries}

    def _check(self, kind: str, copies: Mapping[str, Tensor]) -> None:
        """In the writer's own thread, of the copies: it costs the training nothing."""
        for name in self.finite.get(kind, ()):
            copy = copies.get(name)
            if copy is None or not can_be_checked(copy) or all_finite(copy.reshape(-1)):
                continue
            what = "weights" if kind == "weights" else "optimizer's state"
            raise NonFiniteError(
                f"the {what} after step {self.step} cannot be saved: {name} is not finite", step=self.step
            )


def can_be_checked(tensor: Tensor) -> bool:
    """Whether there is such a thing as a value that is not finite, and torch can find it."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def finite_state(model: nn.Module) -> Iterator[str]:
    """The names in the model's state that are finite and must stay so: what is trained, and small buffers.

    A mask may be made of infinities.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    small = {name: b for name, b in model.named_buffers() if b.nbytes <= MOST_BUFFER_BYTES}
    for name, tensor in {**trained, **small}.items():
        if can_be_checked(tensor) and bool(tensor.detach().isfinite().all()):
            yield name


def _capture(snapshot: Snapshot) -> _Image:
    """Everything small is copied now; weights and optimizer state stay live until they are read."""
    model, optimizer = snapshot.model, snapshot.optimizer
    state = model.state_dict()
    described = _describe(state)
    weights = {name: state[name] for name, how in described.items() if not isinstance(how, str)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    moments: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    plain, stateful = script_state.split(snapshot.state)
    entries: ManifestEntries = {
        "weights": {
            "tensors": described,
            "other": optimizer_state.flatten(rest, "", others, of="the model"),
        },
        "optimizer": {
            "parts": _parts(optimizer, model),
            "state": optimizer_state.flatten(optimizer.state_dict(), "", moments, of="the optimizer"),
        },
        "objects": {
            name: optimizer_state.flatten(each.state_dict(), name, others, of=f"the object {name!r}")
            for name, each in snapshot.objects.items()
        },
        "state": {
            "values": {
                key: optimizer_state.flatten(value, key, others, of=script_state.OF) for key, value in plain.items()
            },
            "objects": {
                key: optimizer_state.flatten(each.state_dict(), key, others, of=f"{script_state.OF}[{key!r}]")
                for key, each in stateful.items()
            },
        },
        "rng": optimizer_state.capture_rng(snapshot.device_rng),
        "extra": optimizer_state.flatten(dict(snapshot.extra), "", None, of="extra"),
    }
    tensors = {
        kind: {name: _Slot(tensor) for name, tensor in named.items()}
        for kind, named in (("weights", weights), ("optimizer", moments), ("objects", others))
    }
    # Buffers change in the next forward, a learning rate with the scheduler, an object whenever it likes.
    lasting = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    early = [slot for name, slot in tensors["weights"].items() if name not in lasting]
    early += [slot for name, slot in tensors["optimizer"].items() if not name.startswith("state.")]
    for slot in (*early, *tensors["objects"].values()):
        slot.read()
    trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    finite = {
        "weights": trained if snapshot.finite is None else snapshot.finite,
        "optimizer": [name for name in moments if name.startswith("state.")],
    }
    return _Image(step=snapshot.step, entries=entries, tensors=tensors, finite=finite)


def _describe(state: Mapping[str, Any]) -> dict[str, Described]:
    """Each tensor's number format and shape, or for a tied one, as text, whose memory it shares."""
    described: dict[str, Described] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        optimizer_state.check_storable(value, name, of="the model")
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and place in first:
            described[name] = _SAME_AS + first[place]
        else:
            first[place] = name
            described[name] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
    return described


def _parts(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Described | int]:
    """What must be the same for an optimizer to take another's state, by words that a message can use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: dict[str, Described | int] = {
        "class": type(optimizer).__name__,
        "number of groups": len(optimizer.param_groups),
    }
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), "(not in the model)")
            parts[f"parameter {index} of group {number}"] = [name, list(parameter.shape)]
    return parts


def _shards(slots: Mapping[str, _Slot], *, always: bool) -> Iterable[dict[str, _Slot]]:
    """Groups of at most SHARD_BYTES (a larger tensor is alone); with `always`, an empty one for nothing."""
    shard: dict[str, _Slot] = {}
    filled = 0
    for name, slot in slots.items():
        if shard and filled + slot.size_bytes > SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        shard[name] = slot
        filled += slot.size_bytes
    if shard or (always and not slots):
        yield shard


def _write_shard(file: Path, shard: Mapping[str, _Slot], copies: dict[str, Tensor]) -> None:
    """One file, on the disk when this returns; its tensors' copies are gone by then."""
    hit("checkpoint.before-file")
    save_file(copies, file, {"format": "pt"})
    hit("checkpoint.file-written")
    for slot in shard.values():
        slot.release()
    sync(file)
    hit("checkpoint.file-synced")


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy in ordinary host memory that nobody else holds."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.device.type == "cpu":
        return plain.clone(memory_format=torch.contiguous_format)
    # Contiguous before it travels: copies of strided views from MPS were silently wrong (pytorch#189961).
    return plain.contiguous().to("cpu")
