"""A rig's workload as settings of a recipe, and its machines as devices, the same for every strategy."""

from __future__ import annotations

from potluck.plan.about import GPT_SEQUENCE
from potluck.spec.rig import Machine, Workload


def recipe_settings(workload: Workload, *, steps: int | None = None, batch: int | None = None) -> dict[str, int]:
    """The recipe's settings; `steps` and `batch` where they differ from the workload's own."""
    samples = batch or workload.global_batch
    settings: dict[str, int] = {"steps": steps or workload.steps, "seed": workload.seed}
    if workload.recipe == "gpt":
        sequence = workload.sequence or GPT_SEQUENCE
        settings |= {"sequence": sequence, "batch_tokens": samples * sequence}
        if workload.depth is not None:
            settings["depth"] = workload.depth
    else:
        settings["global_batch"] = samples
        if workload.enlarge is not None:
            settings["enlarge"] = workload.enlarge
    return settings


def recipe_flags(settings: dict[str, int]) -> list[str]:
    """The same as words of a command line."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def device_name(machine: Machine, *, steady: bool = False) -> str:
    """The value of `--device`; `steady`: without the changes of speed."""
    if machine.seconds_per_sample is None:
        return "cpu"
    changes = () if steady else machine.speed_changes
    return ",".join(
        [f"paced:{machine.seconds_per_sample:g}", *(f"{c.at_step}={c.seconds_per_sample:g}" for c in changes)]
    )
