"""`python -m potluck.cli._warm`: imports what a run needs, then waits for its command, a line of JSON on stdin.

A machine of a sweep starts it in the last seconds of a trial, for the next one: imports are most of a start.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    import torch._dynamo  # noqa: F401  every optimizer imports it, and it takes as long as the rest of torch

    import potluck.cli._session
    import potluck.cli.host
    import potluck.train.run  # noqa: F401
    from potluck.cli import _app

    line = b""
    while not line.endswith(b"\n"):  # what follows the line is the command's stdin
        if not (byte := os.read(0, 1)):
            return  # no trial came
        line += byte
    sys.argv[1:] = json.loads(line)
    _app.main()


if __name__ == "__main__":
    main()
