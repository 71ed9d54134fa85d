"""The step time that a plan saved before the run predicted."""

from __future__ import annotations

from pathlib import Path

from potluck import checked
from potluck.errors import UserError
from potluck.spec.fleet import POTLUCK, SOLO, Plan

PLAN_FILE = "plan.json"


def planned_step_s(file: Path | None, folder: Path, *, alone: bool) -> float | None:
    """Seconds per step that the saved plan predicted; None if there is no plan."""
    path = file or folder / PLAN_FILE
    if file is None and not path.exists():
        return None
    hint = "make it with: potluck plan … --save FILE"
    table = checked.read_json(path, what="a plan file", hint=hint)
    plan = checked.convert(table, Plan, where=f"{path} is not a plan file", error=UserError, hint=hint)
    return plan.row(SOLO if alone else POTLUCK).step_s
