"""Owns checkpoints of a training: what they contain, how they are written during training, and how they are
restored.

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
from typing import Any

import torch
from msgspec import Struct, structs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from potluck.bounds import Long, Named
from potluck.codec.tensors import all_finite
from potluck.durable import sync
from potluck.errors import CheckpointError, NonFiniteError, RunFolderError
from potluck.failpoints import hit
from potluck.train import checkpoint_folder, optimizer_state, script_state
from potluck.train.beginning import MOST_BUFFER_BYTES
from potluck.train.optimizer_state import Json, RngState, Stateful, flatten
from potluck.train.saved_place import SavedPlace
from potluck.train.script_state import ScriptState, StateEntry

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
"""What reading a manifest or a file raises if this module did not write it."""

NOWHERE = SavedPlace(samples=None, global_batch=None, seed=0)
"""The place in a checkpoint that no run made."""


class WeightsEntry(Struct, frozen=True, kw_only=True):
    """The model in a checkpoint's manifest."""

    tensors: Named[Long]
    """Each tensor's number format and shape; for a tied one, the name of the tensor whose memory it shares."""
    other: Json
    """The parts of the model's state that are not tensors."""


class OptimizerEntry(Struct, frozen=True, kw_only=True):
    """The optimizer in a checkpoint's manifest."""

    parts: Named[Long]
    """Its class and its groups, and the name and shape of each parameter."""
    state: Json


class CheckpointManifest(checkpoint_folder.FolderManifest, frozen=True, kw_only=True):
    """What a checkpoint's manifest says. Tensors are names in it."""

    weights: WeightsEntry
    optimizer: OptimizerEntry
    objects: Named[Json]
    state: StateEntry
    """`run.state`."""
    rng: RngState
    place: SavedPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What to save, as live objects: nothing here is a copy."""

    step: int
    """Number of updates made."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    finite: Collection[str] | None = None
    """Names in the model's state that must be finite; otherwise nothing is written and no older checkpoint is
    removed. Default: all trained ones. The optimizer's state must always be finite."""

    objects: Mapping[str, Stateful] = field(default_factory=dict)
    """Other objects with a state_dict(): the scheduler, a scaler, an average of the weights."""

    device_rng: Mapping[str, Tensor] = field(default_factory=dict)
    """States of the devices' random generators; Python's, numpy's and torch's own are always kept."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """The script's own values, `run.state`."""

    place: SavedPlace = NOWHERE
    """Where its run is in its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint whose hashes were all correct."""

    path: Path

    skipped: tuple[tuple[Path, str], ...]
    """Newer checkpoints that are damaged, and why."""

    device_rng: dict[str, Tensor]
    """States that the device layer restores."""

    manifest: CheckpointManifest = field(repr=False)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def place(self) -> SavedPlace:
        return self.manifest.place

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objects: Mapping[str, Stateful],
        state: ScriptState | None = None,
    ) -> None:
        """Restore everything, the random generators last. Mismatches are detected before anything changes.

        `state`: the script's own values, which are replaced by the saved ones.
        """
        saved = self.manifest
        self._compare(saved.weights.tensors, _describe(model.state_dict()), "the model's {}")
        self._compare(saved.optimizer.parts, _parts(optimizer, model), "the optimizer's {}")
        self._compare(dict.fromkeys(saved.objects, "present"), dict.fromkeys(objects, "present"), "the object {}")
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

    def _check_state(self, state: ScriptState) -> None:
        if why := script_state.misfit(state, self.manifest.state):
            raise self._misfit(why)

    def _restore_state(self, state: ScriptState) -> None:
        saved = self.manifest.state
        tensors = {name: tensor.clone() for name, tensor in self._tensors("objects").items()}
        try:
            # One by one: a key may be "$tensor" or another word that has a meaning inside a value.
            state.update({key: optimizer_state.unflatten(value, tensors) for key, value in saved.values.items()})
        except _NOT_AS_WRITTEN as error:
            raise self._forged(error) from error
        for key, each in saved.objects.items():
            try:
                state[key].load_state_dict(optimizer_state.unflatten(each, tensors))
            except (*_NOT_AS_WRITTEN, RuntimeError) as error:  # a module's says in words what differs
                raise self._misfit(f"run.state[{key!r}] cannot take its state ({error})") from error

    def _read(self) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """The states of the model, the optimizer and the objects."""
        saved, unflatten = self.manifest, optimizer_state.unflatten
        try:
            weights: dict[str, Any] = dict(self._tensors("weights"))
            for name, description in saved.weights.tensors.items():
                if description.startswith(_SAME_AS):
                    weights[name] = weights[description.removeprefix(_SAME_AS)]
            # Clones: a tensor mapped from the file would be lost when the checkpoint is removed.
            others = {name: tensor.clone() for name, tensor in self._tensors("objects").items()}
            weights.update(unflatten(saved.weights.other, others))
            state = {name: tensor.clone() for name, tensor in self._tensors("optimizer").items()}
            tree = unflatten(saved.optimizer.state, state)
            return weights, tree, {name: unflatten(each, others) for name, each in saved.objects.items()}
        except _NOT_AS_WRITTEN as error:
            raise self._forged(error) from error

    def _forged(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path / checkpoint_folder.MANIFEST} has the right hash but was not written by potluck "
            f"({type(error).__name__}: {error})",
            hint="restore the folder from a copy, or start a new run",
            step=self.step,
        )

    def restore_rng(self) -> None:
        """Restore Python's, numpy's and torch's CPU generators; restore() ends with this."""
        try:
            optimizer_state.restore_rng(self.manifest.rng)
        except (*_NOT_AS_WRITTEN, RuntimeError, struct.error) as error:
            raise self._forged(error) from error

    def _compare(self, saved: Mapping[str, str], here: Mapping[str, str], what: str) -> None:
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
        for name in self.manifest.files:
            if name.startswith(f"{kind}-"):
                tensors.update(load_file(self.path / name))
        return tensors


class CheckpointWriter:
    """Writes checkpoints during training, in a separate thread.

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
        """All are called in the thread: `before()` it writes, `on_saved(step, path, seconds)` at the end, and
        `on_failed(step, error)` if the disk failed (it is full, or gone)."""
        self._folder = folder
        self._keep = keep
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._before = before
        self._thread: threading.Thread | None = None
        self._unread: list[_Slot] = []
        self._failure: BaseException | None = None

    def start(self, snapshot: Snapshot) -> bool:
        """Begin to write. Returns False while the last checkpoint is still being written. Raises the last one's
        failure, unless the disk failed: that was reported, and this is the next attempt."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self.settle()
        image = _capture(snapshot)
        self._unread = [slot for slots in image.tensors.values() for slot in slots.values()]
        self._thread = threading.Thread(target=self._write, args=(image,), name="potluck-checkpoint")
        self._thread.start()
        return True

    def before_update(self) -> float:
        """Call just before optimizer.step(): copies what is not read yet, and returns the seconds that this
        took."""
        began = time.perf_counter()
        for slot in self._unread:
            slot.read()
        self._unread = []
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the current write has ended. A failure of the disk was reported and raises nothing."""
        with contextlib.suppress(RunFolderError):
            self.wait()

    def wait(self) -> None:
        """Wait until the current checkpoint is on the disk. Raises its failure."""
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
    """Write a checkpoint now and return its folder. All but the last `keep` are removed."""
    image = _capture(snapshot)
    return checkpoint_folder.publish(folder, image.step, image.write, keep=keep)


def load_latest(folder: Path) -> Loaded | None:
    """The newest intact checkpoint; None if there is no checkpoint."""
    skipped: list[tuple[Path, str]] = []
    for path in checkpoint_folder.newest_first(folder):
        try:
            return _loaded(path, checkpoint_folder.verified(path, CheckpointManifest), tuple(skipped))
        except checkpoint_folder.DamagedError as damage:
            skipped.append((path, str(damage)))
    if not skipped:
        return None
    reasons = "; ".join(f"{path.name}: {why}" for path, why in skipped)
    raise CheckpointError(
        f"no checkpoint in {folder} can be read: {reasons}",
        hint="restore the folder from a copy, or start a new run",
    )


def _loaded(path: Path, manifest: CheckpointManifest, skipped: tuple[tuple[Path, str], ...]) -> Loaded:
    """The checkpoint of this manifest, which another program may have written."""
    try:
        device_rng = optimizer_state.device_rng(manifest.rng)
        return Loaded(path=path, skipped=skipped, device_rng=device_rng, manifest=manifest)
    except _NOT_AS_WRITTEN as error:
        what = f"{checkpoint_folder.MANIFEST} lacks what a checkpoint has ({type(error).__name__}: {error})"
        raise checkpoint_folder.DamagedError(what) from error


class _Slot:
    """A tensor to be written: live, then copied by the thread that needs it first, then released."""

    def __init__(self, tensor: Tensor) -> None:
        self.size_bytes = tensor.nbytes
        self._lock = threading.Lock()
        self._live: Tensor | None = tensor.detach()
        self._copy: Tensor | None = None

    def read(self) -> Tensor | None:
        """The copy, made now if necessary; None after release()."""
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
    """A checkpoint to be written: its small parts as JSON, its tensors as slots by kind of file."""

    manifest: CheckpointManifest
    """Without the files, which are not written yet."""
    tensors: dict[str, dict[str, _Slot]]
    finite: Mapping[str, Collection[str]]
    """Names of tensors that must be finite, by kind of file."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def write(self, folder: Path) -> CheckpointManifest:
        """Write the files into `folder`, with one group of tensors in memory at a time. Returns the manifest."""
        files: dict[str, checkpoint_folder.FileEntry] = {}
        for kind, slots in self.tensors.items():
            for number, shard in enumerate(_shards(slots, always=kind != "objects")):
                file = folder / f"{kind}-{number:03d}.safetensors"
                copies = {name: copy for name, slot in shard.items() if (copy := slot.read()) is not None}
                self._check(kind, copies)
                _write_shard(file, shard, copies)
                files[file.name] = checkpoint_folder.fingerprint(file)
        return structs.replace(self.manifest, files=files)

    def _check(self, kind: str, copies: Mapping[str, Tensor]) -> None:
        """Check the copies in the writer's thread, so that it costs the training nothing."""
        for name in self.finite.get(kind, ()):
            copy = copies.get(name)
            if copy is None or not can_be_checked(copy) or all_finite(copy.reshape(-1)):
                continue
            what = "weights" if kind == "weights" else "optimizer's state"
            raise NonFiniteError(
                f"the {what} after step {self.step} cannot be saved: {name} is not finite", step=self.step
            )


def can_be_checked(tensor: Tensor) -> bool:
    """Whether the type has values that are not finite, and torch can detect them."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def finite_state(model: nn.Module) -> Iterator[str]:
    """The names in the model's state that are finite and must stay finite: trained parameters and small buffers.

    A mask may consist of infinities.
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
    weights = {name: state[name] for name, how in described.items() if not how.startswith(_SAME_AS)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    moments: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    plain, stateful = script_state.split(snapshot.state)
    manifest = CheckpointManifest(
        format=checkpoint_folder.FORMAT,
        step=snapshot.step,
        files={},
        weights=WeightsEntry(tensors=described, other=flatten(rest, "", others, of="the model")),
        optimizer=OptimizerEntry(
            parts=_parts(optimizer, model),
            state=flatten(optimizer.state_dict(), "", moments, of="the optimizer"),
        ),
        objects={
            name: flatten(each.state_dict(), name, others, of=f"the object {name!r}")
            for name, each in snapshot.objects.items()
        },
        state=StateEntry(
            values={key: flatten(value, key, others, of=script_state.OF) for key, value in plain.items()},
            objects={
                key: flatten(each.state_dict(), key, others, of=f"{script_state.OF}[{key!r}]")
                for key, each in stateful.items()
            },
        ),
        rng=optimizer_state.capture_rng(snapshot.device_rng),
        place=snapshot.place,
    )
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
    return _Image(manifest=manifest, tensors=tensors, finite=finite)


def _describe(state: Mapping[str, Any]) -> dict[str, str]:
    """Each tensor's number format and shape; for a tied one, the name of the tensor whose memory it shares."""
    described: dict[str, str] = {}
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
            described[name] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return described


def _parts(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, str]:
    """What must be equal for an optimizer to load another's state, with names for an error message."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: dict[str, str] = {
        "class": type(optimizer).__name__,
        "number of groups": str(len(optimizer.param_groups)),
    }
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), "(not in the model)")
            parts[f"parameter {index} of group {number}"] = f"{name} {list(parameter.shape)}"
    return parts


def _shards(slots: Mapping[str, _Slot], *, always: bool) -> Iterable[dict[str, _Slot]]:
    """Groups of at most SHARD_BYTES (a larger tensor is alone). With `always`, at least one group, even if
    empty."""
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
    """Write one file. When this returns, it is on the disk and its tensors' copies are freed."""
    hit("checkpoint.before-file")
    save_file(copies, file, {"format": "pt"})
    hit("checkpoint.file-written")
    for slot in shard.values():
        slot.release()
    sync(file)
    hit("checkpoint.file-synced")


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy in ordinary host memory."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.device.type == "cpu":
        return plain.clone(memory_format=torch.contiguous_format)
    # Contiguous before it travels: copies of strided views from MPS were silently wrong (pytorch#189961).
    return plain.contiguous().to("cpu")
