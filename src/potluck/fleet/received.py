"""Runs the host's work on a guest: a recipe by its name, or a script with its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from potluck.checked import build
from potluck.errors import MissingModuleError
from potluck.fleet.script import guest_hint, missing_here, read_script, received_script, run_file, run_received
from potluck.fleet.script_errors import GUEST_HINT, HINT, IN_LOOP_HINT, PLAIN_NAME, running
from potluck.train import recipes
from potluck.train.context import RunContext
from potluck.train.recipes.job import train as train_recipe


def run_work(context: RunContext, local: Path | None, tell: Callable[[str], None]) -> None:
    """Run the host's work, or the script `local` instead. `tell` is called with a description before it begins."""
    assert context.welcome is not None
    source = context.welcome.message.source
    if source.recipe:
        recipe = recipes.get(source.recipe)
        tell(f"the recipe {recipe.name}")
        train_recipe(recipe, build(recipe.Config, source.config))
        return
    names, arguments = source.files, source.arguments
    if local is not None:
        script = read_script(local, (), arguments)
        tell(f"the local script {local} (sha256 {script.sha256[:16]}…)")
        with running(local.name, hint=lambda: IN_LOOP_HINT if context.loop.began else HINT, guest=True):
            run_file(local, arguments)
        return
    contents = [bytes(f) for f in context.welcome.frames]
    script = received_script(names, contents, arguments, source.sha256)
    _check_modules(names[0], source.imports)
    tell(f"{names[0]} from the host (sha256 {script.sha256[:16]}…)")
    with running(names[0], hint=lambda: IN_LOOP_HINT if context.loop.began else GUEST_HINT, guest=True, sent=names):
        run_received(script)


def _check_modules(script: str, imports: dict[str, str]) -> None:
    """Before the script runs, raise an error that lists all modules that it imports and this machine lacks."""
    names = {module: where for module, where in imports.items() if all(map(PLAIN_NAME.fullmatch, (module, where)))}
    missing = missing_here(names)
    if missing:
        raise MissingModuleError(
            f"this machine lacks what {script} imports: {', '.join(missing)}", hint=guest_hint(missing)
        )
