"""Begins a resumed run: loads the newest readable checkpoint and checks that the settings are unchanged.

Owns these checks, and the order in which model, optimizer, random numbers and data are restored.
"""

from __future__ import annotations

import torch
from torch import nn

from potluck.errors import CheckpointError, ConfigError
from potluck.spec.events import CheckpointDamaged, CheckpointSaved, RunNote, StepEnded
from potluck.train import checkpoint_folder
from potluck.train.checkpoint import Loaded, load_latest
from potluck.train.context import RunContext
from potluck.train.event_log import events_in
from potluck.train.folder import RunFolder
from potluck.train.optimizer_state import Stateful
from potluck.train.options import Options
from potluck.train.script_state import ScriptState
from potluck.train.step_loader import StepLoader


def restore(
    context: RunContext,
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: dict[str, Stateful],
    loader: StepLoader,
    state: ScriptState,
) -> Loaded | None:
    """Load the newest readable checkpoint of a run that is resumed; the model and optimizer continue from it."""
    if not context.resume or context.folder is None:
        return None
    checkpoint_folder.tidy(context.folder.checkpoints)
    loaded = load_latest(context.folder.checkpoints)
    if loaded is None:
        _without_checkpoint(context, context.folder)
        return None
    for path, reason in loaded.skipped:
        context.log.emit(CheckpointDamaged(path=str(path), reason=reason, resumed_from=loaded.step))
    saved = loaded.place
    compared = (
        (saved.global_batch, loader.global_batch, "global_batch {}, now it is {}", "keep global_batch as it was"),
        (saved.seed, options.seed, "seed {}, now it is {}", "keep seed as it was"),
        (saved.samples, loader.samples, "{} samples, now there are {}", "give it the same data"),
    )
    for then, here, what, keep in compared:
        if then != here:
            raise ConfigError(
                f"the run was started with {what.format(then, here)}",
                hint=f"a resumed run resumes at exactly the next sample: {keep}, or start a new run",
            )
    loaded.restore(model, optimizer, objects, state)
    context.device.set_rng_state(dict(loaded.device_rng))
    loader.resume(loaded.step, saved.data)
    return loaded


def _without_checkpoint(context: RunContext, folder: RunFolder) -> None:
    """A run that saved nothing starts again, and says so. A run whose checkpoints are missing is an error."""
    steps = saved = 0
    for event in events_in(folder.events):
        match event:
            case CheckpointSaved(step=step):
                saved = max(saved, step)
            case StepEnded(step=step):
                steps = max(steps, step)
    if saved:
        raise CheckpointError(
            f"the run was saved up to step {saved}, but there is no checkpoint in {folder.checkpoints}",
            hint="restore the whole folder from a copy, or start a new run",
        )
    again = f"; the {steps} steps that were computed are computed again" if steps else ""
    context.log.emit(RunNote(text=f"there is no checkpoint yet: starting again at step 1{again}"))
