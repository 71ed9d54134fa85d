"""The run folder: where a run's files lie and how its manifest is written and read.

Owns paths and the manifest. It knows no training.

    runs/<id>/manifest.json    the resolved config, versions and machines
              events.jsonl     every step and every notable event
              checkpoints/     the last two checkpoints
              keys.json        the run's keys (0600), so that the same token holds after a restart
              token            what guests type (0600)
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.errors import RunFolderError

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def keys(self) -> Path:
        return self.path / "keys.json"

    @property
    def token(self) -> Path:
        return self.path / "token"

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        temporary = self.path / (MANIFEST + ".new")
        text = json.dumps(manifest, indent=2, default=str)
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / MANIFEST)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{self.path} is not a run: it has no {MANIFEST}",
                hint="give the folder of a run, such as runs/20260102-030405-gpt",
            ) from error
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / MANIFEST} cannot be read: {error}") from error
        if not isinstance(manifest, dict) or "config" not in manifest:
            raise RunFolderError(f"{self.path / MANIFEST} is not the manifest of a run")
        return manifest


def new_folder(runs: Path, what: str) -> RunFolder:
    """A new, empty run folder; its name tells when and what."""
    stem = time.strftime("%Y%m%d-%H%M%S") + "-" + "".join(c if c.isalnum() else "-" for c in what)[:30]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for name in [stem, *(f"{stem}-{secrets.token_hex(2)}" for _ in range(20))]:
            path = runs / name
            try:
                path.mkdir()
            except FileExistsError:
                continue
            (path / "checkpoints").mkdir()
            return RunFolder(path)
    except OSError as error:
        raise _unwritable(runs, error) from error
    raise RunFolderError(f"could not find a free name for a run in {runs}")


def open_folder(path: Path) -> RunFolder:
    """The folder of a run that exists; anything else is an error."""
    if not path.is_dir():
        raise RunFolderError(f"there is no folder {path}", hint="see your run folders with: ls runs")
    folder = RunFolder(path)
    folder.read_manifest()
    return folder


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write to {path}: {error.strerror or error}",
        hint="choose a folder you can write to with --runs DIR or POTLUCK_RUNS",
    )
