"""The command line: one file per verb, each parses, calls and renders. Nothing here trains or talks."""

from potluck.cli._app import main

__all__ = ["main"]
