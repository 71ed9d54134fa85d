"""`python -m potluck.sweep.warm`: imports what a run needs, then waits for its command, a line of JSON on stdin.

A machine of a sweep starts it in the last seconds of a trial, for the next one, because imports take most of a
start.
"""

from __future__ import annotations

import os
import runpy
import sys

from potluck import checked
from potluck.bounds import Many, Text


def main() -> None:
    import torch._dynamo  # noqa: F401  every optimizer imports it, and it takes as long as the rest of torch

    import potluck.fleet.local
    import potluck.fleet.script_errors
    import potluck.loggers.writing
    import potluck.report.view
    import potluck.train.run
    import potluck.train.run_specs  # noqa: F401

    line = b""
    while not line.endswith(b"\n"):  # what follows the line is the command's stdin
        if not (byte := os.read(0, 1)):
            return  # no trial came
        line += byte
    sys.argv[1:] = checked.decoder(Many[Text]).decode(line)
    runpy.run_module("potluck", run_name="__main__")


if __name__ == "__main__":
    main()
