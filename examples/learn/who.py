"""Prints what torchrun told this process: torchrun --nproc-per-node 2 examples/learn/who.py"""

import os
import sys

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
line = " ".join(f"{name}={os.environ.get(name, '-')}" for name in NAMES)
sys.stdout.write(f"{line}\n")  # in one piece: torchrun's processes share their output
