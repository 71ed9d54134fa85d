"""The step time that a plan saved before the run predicted."""

from __future__ import annotations

import json
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
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}",
            hint="--plan takes a file made by: potluck plan … --save FILE",
        ) from error
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not a plan file", hint=hint) from None
    plan = checked.convert(table, Plan, where=f"{path} is not a plan file", error=UserError, hint=hint)
    return plan.row(SOLO if alone else POTLUCK).step_s
