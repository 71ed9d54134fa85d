"""A group that breaks: torchrun --standalone --nproc-per-node 2 examples/learn/broken.py FAULT

Two ranks call all_reduce in five steps. In step 3 rank 1 does what FAULT says: `none`, `slow` (3 s), `late` (longer
than the timeout of 15 s), `die` (killed, as if memory ran out) or `once` (dies in the first attempt only).
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 15
fault = sys.argv[1]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
dist.init_process_group("potluck", timeout=timedelta(seconds=TIMEOUT_S))
rank = dist.get_rank()
for step in range(1, 6):
    if rank == 1 and step == 3:
        if fault in ("slow", "late"):
            time.sleep(3 if fault == "slow" else TIMEOUT_S + 5)
        elif fault == "die" or (fault == "once" and attempt == 0):
            os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    dist.all_reduce(torch.ones(1000))
    if rank == 0:
        print(f"attempt {attempt}, step {step}: waited {time.monotonic() - begin:.1f} s", flush=True)
dist.destroy_process_group()
