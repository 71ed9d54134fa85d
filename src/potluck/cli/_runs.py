"""Finds a run folder by its path or by the run's id."""

from __future__ import annotations

from pathlib import Path

from potluck.cli._app import Settings
from potluck.errors import RunFolderError


def runs_folder(settings: Settings, given: Path | None = None) -> Path:
    return given or settings.environment.runs or Path("runs")


def find_run(run: str | None, runs: Path) -> Path:
    """The run's folder, by path or by its id inside `runs`; the newest run if `run` is None."""
    known = sorted(
        (p.parent for p in runs.glob("*/events.jsonl")), key=lambda p: (p / "events.jsonl").stat().st_mtime
    )
    if run is None:
        if not known:
            raise RunFolderError(f"there is no run in {runs}", hint="name a run folder: potluck report RUN")
        return known[-1]
    for folder in (Path(run), runs / run):
        if folder.is_dir():
            return folder
    newest = ", ".join(p.name for p in reversed(known[-3:]))
    raise RunFolderError(
        f"no run folder {run!r}, neither here nor in {runs}",
        hint=f"the newest runs: {newest}" if newest else "name the folder that a run printed at its end",
    )
