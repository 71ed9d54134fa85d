"""The settings with which a run was started: the contents of its manifest.json. PURE.

The table in docs/reference/run-folder.md is generated from this file.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from potluck.bounds import Many, Named, Natural, Settings, Text
from potluck.spec.config import RunConfig
from potluck.spec.messages import Source


class Manifest(Struct, frozen=True, kw_only=True):
    """Written before anything starts, and again at each resume."""

    what: Text
    """Name of the recipe or of the script."""
    command: Literal["train", "host"]
    """Command that started the run."""
    config: RunConfig
    """The [run settings](configuration.md#run-settings), from file and flags. Settings that came from `POTLUCK_*`
    variables are null here."""
    recipe: RecipeEntry | None = None
    """Recipe and its settings; null for a script."""
    source: Source | None = None
    """What guests run: `recipe` and `config`, or for a script `files`, `arguments`, `sha256` and `imports`. Null in
    a notebook until training begins."""
    versions: Named[Text]
    """Versions of potluck, torch and Python on the host."""
    machines: Many[MachineEntry]
    """The host and, added when the run ends, every guest that joined."""
    guests: Natural = 0
    """Number of guests started on this machine by `potluck train`."""
    port: Natural | None = None
    """Port on which the host listens; a resumed run uses it again. Null if guests cannot join."""

    def config_to_resume(self) -> RunConfig:
        """The run settings without the wait for guests, which a resumed run does not repeat."""
        return structs.replace(self.config, wait_for=0)


class RecipeEntry(Struct, frozen=True, kw_only=True):
    """The recipe in a manifest."""

    name: Text
    """Name of the recipe."""
    config: Settings
    """All [recipe settings](configuration.md#recipe-settings)."""


class MachineEntry(Struct, frozen=True, kw_only=True):
    """A machine in a manifest. The events say when each joined and left."""

    name: Text
    """Name of the machine."""
    role: Text
    """`host`, `guest`, or `alone`."""
    device: Text
    """What it computes on."""
