"""Where the run folders are: a flag, else the environment, else `runs`."""

from __future__ import annotations

from pathlib import Path

from potluck.cli._app import Settings


def runs_folder(settings: Settings, given: Path | None = None) -> Path:
    return given or settings.environment.runs or Path("runs")
