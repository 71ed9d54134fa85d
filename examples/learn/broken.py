"""A group that breaks: torchrun --standalone --nproc-per-node 2 examples/learn/broken.py FAULT --guess SECONDS

Two ranks call all_reduce in five steps. In step 3 rank 1 does what FAULT says: `slow` (sleeps 3 s), `late` (sleeps
5 s longer than the timeout), `die` (is killed, as if memory ran out) or `once` (dies in the first attempt only).
"""

import argparse
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from guess import verdict

options = argparse.ArgumentParser()
options.add_argument("fault", choices=["none", "slow", "late", "die", "once"])
options.add_argument("--backend", default="potluck", help="gloo tells the same with less detail")
options.add_argument("--timeout", type=float, default=15, help="timeout of the group in seconds")
options.add_argument("--guess", type=float, help="seconds that you think rank 0 waits in step 3")
args = options.parse_args()

attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout))
rank = dist.get_rank()
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks at once: let this one say what it saw
for step in range(1, 6):
    if rank == 1 and step == 3:
        if args.fault in ("slow", "late"):
            time.sleep(3 if args.fault == "slow" else args.timeout + 5)
        elif args.fault == "die" or (args.fault == "once" and attempt == 0):
            os.kill(os.getpid(), signal.SIGKILL)
    begin, failed = time.monotonic(), None
    try:
        dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        failed = error
    waited_s = time.monotonic() - begin
    if rank == 0:
        end = f", then {type(failed).__name__}" if failed else ""
        print(f"attempt {attempt}, step {step}: waited {waited_s:.1f} s{end}", flush=True)
        if step == 3 and args.guess is not None:
            print(verdict(args.guess, waited_s, " s"), flush=True)
    if failed:
        raise failed
dist.destroy_process_group()
