"""The command line: one file per verb. Each parses its arguments, calls the library and prints the result."""

from potluck.cli._app import main

__all__ = ["main"]
