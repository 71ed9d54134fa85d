"""Memory beyond plain training (weights and one gradient), in bytes a parameter, on the host and on a guest.

    .venv/bin/python bench/memory.py [--codec int4]

Trains the same 50 M-parameter model alone and with one guest, as processes of their own on this machine, and
compares the resident memory of the processes after the same number of steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # what is freed is given back at once: resident is in use
JOB = Path(__file__).parent / "jobs" / "memory_job.py"


def rss(file: Path) -> tuple[int, int]:
    parameters, resident = file.read_text().split()
    return int(parameters), int(resident)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        subprocess.run([sys.executable, str(JOB), str(out)], check=True)
        command = [sys.executable, "-m", "potluck", "host", str(JOB), "--bind", "127.0.0.1", "--view", "quiet"]
        command += ["--codec", options.codec, "--wait-for", "1", "--checkpoint-every", "0"]
        command += ["--runs", str(out / "runs")]
        host = subprocess.Popen([*command, "--device", "paced:0.05", "--", str(out)], stdout=subprocess.DEVNULL)
        while not (tokens := list(out.glob("runs/*/token"))):
            time.sleep(0.1)
            if host.poll() is not None:
                raise SystemExit("the host failed")
        join = [sys.executable, "-m", "potluck", "join", "--token-file", str(tokens[0]), "--view", "quiet"]
        guest = subprocess.Popen([*join, "--device", "paced:0.05"])
        if host.wait(300) or guest.wait(30):
            raise SystemExit("the run failed")
        parameters, alone = rss(out / "alone.txt")
        _, with_guest = rss(out / "host.txt")
        _, at_guest = rss(out / "guest.txt")
    print(f"{parameters / 1e6:.1f} M parameters, codec {options.codec}, fp32; bytes a parameter")
    print(f"host, beyond training alone:           {(with_guest - alone) / parameters:6.2f}")
    print(f"guest, beyond its weights and gradient: {(at_guest - alone) / parameters:6.2f}")


if __name__ == "__main__":
    main()
