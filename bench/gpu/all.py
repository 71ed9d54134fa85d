"""Every figure of the GPU in one call: python bench/gpu/all.py [--only codec,staging,parity,finite,tax,desk]

About ten minutes on one H200 with 16 cores. Each part runs in a process of its own, so that the GPU's memory is
free again for the next; one that fails says why, and the others follow.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time

import torch
from _runs import HERE, say

PARTS = {
    "codec": ["codec_rates.py"],
    "staging": ["staging.py", "--replica", "host"],
    "staging-device": ["staging.py", "--replica", "device"],
    "parity": ["parity.py"],
    "finite": ["finite.py"],
    "tax": ["tax.py", "--plain"],
    "alone": ["alone.py"],
    "trainer": ["trainer.py"],
    "desk": ["desk.py"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Every figure of the GPU.")
    parser.add_argument("--only", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    parser.add_argument("--limit-s", type=float, default=400.0, help="for each part")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        say("there is no CUDA device here")
        return 1
    name, day = torch.cuda.get_device_name(), time.strftime("%Y-%m-%d")
    say(f"# {name}, torch {torch.__version__}, Python {platform.python_version()}, {day}")
    failed = 0
    for part in options.only.split(","):
        began = time.monotonic()
        try:
            command = [sys.executable, str(HERE / PARTS[part][0]), *PARTS[part][1:]]
            done = subprocess.run(command, timeout=options.limit_s, check=False)
            failed += done.returncode != 0
        except subprocess.TimeoutExpired:
            failed += 1
            say(f"{part} took longer than {options.limit_s:.0f} s")
        say(f"## {part}: {time.monotonic() - began:.0f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
