"""Folders of checkpoints: damage is found, kills and full disks do no harm, few are kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from potluck import failpoints
from potluck.errors import CheckpointError, RunFolderError
from potluck.train import checkpoint_folder
from potluck.train.checkpoint import CheckpointWriter, Snapshot, load_latest
from potluck.train.checkpoint_folder import tidy
from potluck.train.saved_place import SavedPlace
from support.processes import Processes
from support.small_checkpoints import linear, names_in, save_linear

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = (SavedPlace(samples=8, global_batch=2, seed=seed) for seed in (1, 2))


def test_the_last_two_are_kept_and_left_overs_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_linear(tmp_path, step)
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    (tmp_path / ".tmp-00000004-123").mkdir()
    (tmp_path / ".tmp-00000004-123" / "weights-000.safetensors").write_bytes(b"half")
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 3
    save_linear(tmp_path, 4)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]


def test_what_a_cut_off_removal_left_is_removed_before_a_run_goes_on(tmp_path: Path) -> None:
    """A run that was killed at its very end has nothing to save any more when it is resumed."""
    for step in (1, 2):
        save_linear(tmp_path, step)
    with failpoints.armed("checkpoint.removing=raise"), pytest.raises(RunFolderError):
        save_linear(tmp_path, 3)
    assert names_in(tmp_path) == [".tmp-gone-step-00000001", "step-00000002", "step-00000003"]
    tidy(tmp_path)
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    tidy(tmp_path / "not there")


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save_linear(tmp_path, 1)
    save_linear(tmp_path, 2, place=FIRST)
    save_linear(tmp_path, 2, place=SECOND)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.place == SECOND


def test_a_replacement_that_was_cut_off_is_found(tmp_path: Path) -> None:
    newer = save_linear(tmp_path, 2, place=SECOND)
    newer.rename(tmp_path / "step-00000002.new")
    save_linear(tmp_path / "elsewhere", 2, place=FIRST).rename(tmp_path / "step-00000002")
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.place == SECOND
    save_linear(tmp_path, 3)
    assert names_in(tmp_path) == ["elsewhere", "step-00000002", "step-00000003"]
    damage(tmp_path / "step-00000003" / "manifest.json", "truncate")
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.place == SECOND


def test_a_damaged_replacement_does_not_push_out_the_good_one(tmp_path: Path) -> None:
    """The save was cut off before it replaced the first one, and the disk has spoiled it since."""
    save_linear(tmp_path / "elsewhere", 2).rename(tmp_path / "step-00000002.new")
    save_linear(tmp_path / "elsewhere", 2, place=FIRST).rename(tmp_path / "step-00000002")
    damage(tmp_path / "step-00000002.new" / "weights-000.safetensors", "flip")
    with failpoints.armed("checkpoint.before-folder=raise"), pytest.raises(RunFolderError):
        save_linear(tmp_path, 3)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.place) == (2, FIRST)


def test_a_damaged_later_step_does_not_push_out_good_ones(tmp_path: Path) -> None:
    for step in (100, 200):
        save_linear(tmp_path, step)
    damage(tmp_path / "step-00000200" / "weights-000.safetensors", "flip")
    save_linear(tmp_path, 150)  # the run was resumed at 100
    assert names_in(tmp_path) == ["step-00000100", "step-00000150"]


def damage(file: Path, how: str) -> None:
    raw = bytearray(file.read_bytes())
    if how == "truncate":
        raw = raw[: len(raw) // 2]
    elif how == "cut one byte":
        raw = raw[:-1]
    elif how == "flip":
        raw[len(raw) // 2] ^= 1
    elif how == "flip last":
        raw[-1] ^= 1
    elif how == "flip first":
        raw[0] ^= 1
    if how == "delete":
        file.unlink()
    else:
        file.write_bytes(raw)


@pytest.mark.parametrize("how", ["truncate", "cut one byte", "flip", "flip first", "flip last", "delete"])
def test_damage_in_any_file_is_found_and_the_previous_used(tmp_path: Path, how: str) -> None:
    optimizer_state = {"objects": {"average": nn.Linear(2, 2)}}
    save_linear(tmp_path, 1, **optimizer_state)
    newest = save_linear(tmp_path, 2, **optimizer_state)
    assert len(names_in(newest)) == 4
    for name in names_in(newest):
        whole = (newest / name).read_bytes()
        damage(newest / name, how)
        loaded = load_latest(tmp_path)
        assert loaded is not None
        assert loaded.step == 1
        ((path, reason),) = loaded.skipped
        assert path == newest
        assert name in reason
        (newest / name).write_bytes(whole)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.skipped) == (2, ())


def test_every_single_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    manifest = save_linear(tmp_path, 1) / "manifest.json"
    whole = manifest.read_bytes()
    for position in range(0, len(whole), 97):
        changed = bytearray(whole)
        changed[position] ^= 0x01
        manifest.write_bytes(changed)
        with pytest.raises(CheckpointError, match="manifest"):
            load_latest(tmp_path)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"no {key}": lambda m, key=key: m.pop(key) for key in ("format", "files", "weights", "place", "rng", "step")
    },
    "files as a list": lambda m: m.update(files=[1, 2]),
    "a file without a size": lambda m: m["files"].update({"weights-000.safetensors": {}}),
    "a file elsewhere": lambda m: m["files"].update({"../secret": {"bytes": 1, "sha256": ""}}),
    "a step as text": lambda m: m.update(step="1e9"),
    "a step before the first": lambda m: m.update(step=-1),
    "tensors as text": lambda m: m["weights"].update(tensors="all"),
    "a place as a number": lambda m: m.update(place=5),
    "another place": lambda m: m["place"].update(samples="many"),
    "an epoch before the first": lambda m: m["place"].update(data={"epoch": -1}),
    "a shape as text": lambda m: m["weights"]["tensors"].update(weight=["float32", [4, 4]]),
    "a generator without words": lambda m: m["rng"].update(python=["x"]),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_manifest_is_damage_and_the_previous_is_used(tmp_path: Path, how: str) -> None:
    """With the right hash: whoever wrote it knows how that is made."""
    save_linear(tmp_path, 1)
    file = save_linear(tmp_path, 2) / "manifest.json"
    manifest = json.loads(file.read_text())
    FORGERIES[how](manifest)
    file.write_bytes(checkpoint_folder._rendered(manifest))
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert "manifest.json" in loaded.skipped[0][1] or "secret" in loaded.skipped[0][1]


def test_a_manifest_nested_without_end_is_damage(tmp_path: Path) -> None:
    file = save_linear(tmp_path, 1) / "manifest.json"
    file.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(CheckpointError, match=r"step-00000001: manifest\.json is damaged"):
        load_latest(tmp_path)


@pytest.mark.parametrize("how", ["rng", "huge rng", "optimizer", "groups"])
def test_what_is_forged_deeper_is_a_clear_error(tmp_path: Path, how: str) -> None:
    model, optimizer = linear()
    file = save_linear(tmp_path, 1) / "manifest.json"
    manifest = json.loads(file.read_text())
    if how == "rng":
        manifest["rng"]["python"][1] = "x"
    elif how == "huge rng":
        manifest["rng"]["numpy"]["state"]["pos"] = 10**30
    elif how == "groups":
        manifest["optimizer"]["state"]["param_groups"] = [{}]
    else:
        manifest["optimizer"]["state"] = {"$tensor": "nowhere"}
    file.write_bytes(checkpoint_folder._rendered(manifest))
    loaded = load_latest(tmp_path)
    assert loaded is not None
    with pytest.raises(CheckpointError, match=r"manifest\.json") as forged:
        loaded.restore(model, optimizer, {})
    assert (forged.value.code, forged.value.step) == ("bad-checkpoint", 1)


def test_no_readable_checkpoint_names_each_and_why(tmp_path: Path) -> None:
    for step in (1, 2):
        damage(save_linear(tmp_path, step) / "optimizer-000.safetensors", "flip")
    with pytest.raises(
        CheckpointError, match=r"step-00000002: optimizer-000\.safetensors.*; step-00000001: opt"
    ) as c:
        load_latest(tmp_path)
    assert c.value.hint


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "missing") is None


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "checkpoints"
    with pytest.raises(
        RunFolderError, match=r"cannot write a checkpoint into .*checkpoints: Not a directory"
    ) as caught:
        save_linear(folder, 1)
    assert caught.value.hint
    assert caught.value.exit_status == 2
    told: list[int] = []
    writer = CheckpointWriter(folder, on_failed=lambda step, error: told.append(step))
    model, optimizer = linear()
    assert writer.start(Snapshot(step=1, model=model, optimizer=optimizer))
    with pytest.raises(RunFolderError):
        writer.wait()
    writer.close()  # a failure is reported once
    assert writer.start(Snapshot(step=2, model=model, optimizer=optimizer))
    assert writer._thread is not None
    writer._thread.join()
    assert writer.start(Snapshot(step=3, model=model, optimizer=optimizer)), "the next attempt"
    with pytest.raises(RunFolderError):
        writer.wait()
    assert told == [1, 2, 3]
    with pytest.raises(RunFolderError):
        load_latest(tmp_path / "file")


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
def test_a_disk_that_takes_no_more_leaves_the_old_ones_whole(tmp_path: Path) -> None:
    import resource

    save_linear(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RunFolderError, match=r"cannot write a checkpoint into .*: File too large") as caught:
            save_linear(tmp_path, 2, size=400)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.hint
    assert names_in(tmp_path) == ["step-00000001"]
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
sys.path[:0] = [sys.argv[2], os.path.dirname(sys.argv[2])]
from test_checkpoint_folder import linear, load_latest, names_in, save_linear
torch.set_num_threads(1)
folder = Path(sys.argv[1])
save_linear(folder, 1, size=300)
chance, newest, cut_off, kills, began = random.Random(5), 1, 0, 0, time.monotonic()
# On a box that is busy with other things a child may get nowhere: then more are tried.
while kills < 12 or (time.monotonic() - began < 30 and not (newest > 3 and cut_off)):
    kills += 1
    child = os.fork()
    if child == 0:
        step = newest
        while True:
            # Every third time the step that is already there: replacing one must be safe, too.
            step += step % 3 != 0 or chance.random() < 0.5
            save_linear(folder, step, size=300)
    time.sleep(chance.uniform(0.02, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut_off += any(name.startswith(".tmp-") for name in names_in(folder))
    loaded = load_latest(folder)
    assert loaded is not None and not loaded.skipped, loaded
    assert loaded.step >= newest, (loaded.step, newest)
    newest = loaded.step
    model, optimizer = linear(size=300)
    loaded.restore(model, optimizer, {})
    assert all(bool((p == newest).all()) for p in model.parameters())
save_linear(folder, newest + 1, size=300)
assert len(names_in(folder)) == 2, names_in(folder)
assert newest > 3 and cut_off > 0, (newest, cut_off)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_the_newest_is_readable(tmp_path: Path) -> None:
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    with Processes(tmp_path / "logs") as processes:
        processes.python(str(script), str(tmp_path / "saved"), str(Path(__file__).parent)).succeeds(deadline_s=50)
