"""The keywords of `run.steps`, their meaning and their checks."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from potluck.checked import nearest
from potluck.errors import ConfigError
from potluck.train.given import NO_SCALER, check_saved
from potluck.train.optimizer_state import Stateful
from potluck.train.packing import Collate

_DATA = "'sent': guests get the samples from the host; 'local': each guest has the data set itself"
_LOSS = "it says what step.backward() is given: the mean over the samples of the batch, or their sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the loop trains; the same on every machine."""

    global_batch: int | None = None
    """Samples per step, over all machines. With a DataLoader, its batch size; any other value is refused."""
    steps: int | None = None
    """Total number of steps; a resumed run continues up to it. Endless if not given: break when done."""
    epochs: int | None = None
    """Total number of epochs; a resumed run continues up to it. With steps=, whichever comes first."""
    clip_norm: float | None = None
    """Clip the whole gradient to this norm before the update."""
    scheduler: Any = None
    """A learning-rate scheduler, stepped after every step, even if its update was not made. Saved in checkpoints.

    ReduceLROnPlateau gets the step's loss, so its patience counts steps.
    """
    collate: Collate | None = None
    """Turns a list of samples into a batch; torch's default_collate if not given."""
    data: str = "sent"
    """"sent": the host sends samples to guests with their leases. "local": each guest has the data set itself."""
    seed: int = 0
    """Random seed for the sample order."""
    micro_batch: int | None = None
    """Samples computed at once, on every machine without its own setting; found by measuring if not given."""
    loss_is: str = "mean"
    """Whether the loss given to step.backward is the "mean" or the "sum" over its samples (or items)."""
    before_update: Callable[[nn.Module], None] | None = None
    """Called with the model once its gradients are complete, before clipping and the update (host, all ranks)."""
    also_save: Mapping[str, Stateful] = field(default_factory=dict)
    """More objects to save in checkpoints, by name; they need state_dict() and load_state_dict()."""
    tokens_per_sample: int | None = None
    """Tokens per sample; the view then shows tokens/s."""
    by_trainer: bool = False
    """Whether a trainer clips the gradient, makes the update and saves: see `integrations`. Not a keyword of
    `run.steps`."""

    @property
    def usual_batch(self) -> int:
        """Samples in most steps: known once the loader is open."""
        assert self.global_batch is not None
        return self.global_batch

    def saved_objects(self) -> dict[str, Stateful]:
        """The objects that checkpoints contain besides the model and the optimizer, by name."""
        return {**self.also_save, **({"scheduler": self.scheduler} if self.scheduler is not None else {})}


def make_options(unknown: Mapping[str, Any], **keywords: Any) -> Options:
    """The checked keywords. `unknown`: other keywords given to run.steps()."""
    for key in unknown:
        if "scaler" in key:
            raise ConfigError(f"run.steps() takes no {key}: it is not needed", hint=NO_SCALER)
        raise ConfigError(
            f"run.steps() has no keyword {key!r}",
            hint=nearest(key, [f.name for f in fields(Options) if f.name != "by_trainer"]),
        )
    options = Options(**{**keywords, **_whole_numbers(keywords)})
    if options.data not in ("sent", "local"):
        raise ConfigError(f"data must be 'sent' or 'local', not {options.data!r}", hint=_DATA)
    if options.loss_is not in ("mean", "sum"):
        raise ConfigError(f"loss_is must be 'mean' or 'sum', not {options.loss_is!r}", hint=_LOSS)
    if (most := options.clip_norm) is not None and not (isinstance(most, int | float) and most > 0):
        # Below 0 torch would turn the gradient round, and NaN would be in every weight.
        raise ConfigError(f"clip_norm must be a number above 0, not {most!r}", hint="without it nothing is clipped")
    check_saved(options.also_save.values())
    return options


_LEAST = {"global_batch": 1, "steps": 0, "epochs": 1, "micro_batch": 1, "seed": None, "tokens_per_sample": 0}
_HINTS = {
    "global_batch": "global_batch=64, as an int; or give a DataLoader, and leave it out",
    "micro_batch": "without it the size is measured",
    "seed": "seed=0, as an int",
    "tokens_per_sample": "without it no tokens/s are shown",
}


def _whole_numbers(keywords: Mapping[str, Any]) -> dict[str, int]:
    """The keywords that are whole numbers, as Python's own int: no log and no checkpoint takes a numpy.int64."""
    found = {}
    for name, least in _LEAST.items():
        if (given := keywords.get(name)) is None:
            continue
        number = None
        with contextlib.suppress(TypeError):
            found[name] = number = operator.index(given)
        if number is None or (least is not None and number < least):
            raise ConfigError(
                f"{name} must be a whole number{'' if least is None else f' of at least {least}'}, not {given!r}",
                hint=_HINTS.get(
                    name,
                    f"{name}=10, as an int; without steps= and epochs= the training ends where the loop is left",
                ),
            )
    return found
