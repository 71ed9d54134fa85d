"""DDP from the inside: torchrun --standalone --nproc-per-node 2 examples/learn/inside.py --steps 3

Each rank prints its own loss, the mean of all ranks' losses and a checksum of all bits of its weights. Rank 0
prints the buckets in which DDP sent the gradients. `--alone` leaves DDP out, `--profile` shows what torch's
profiler sees.
"""

import argparse
import time
import zlib

import torch
import torch.distributed as dist
from guess import verdict
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=2, help="DDP makes its buckets after the first step")
options.add_argument("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb, in MiB")
options.add_argument("--alone", action="store_true", help="do not average the gradients")
options.add_argument("--tries", type=int, default=8, help="steps to look into: the fastest of them is shown")
options.add_argument("--profile", action="store_true")
options.add_argument("--guess", type=float, help="number of buckets that you expect")
args = options.parse_args()

torch.set_num_threads(1)
dist.init_process_group("potluck")
rank = dist.get_rank()
torch.manual_seed(1)  # the same weights at the beginning
layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]  # 8 × 1.05 MB of gradients
model = nn.Sequential(*layers, nn.Linear(512, 10))
trained = model if args.alone else DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(100 + rank)  # other samples on every rank

buckets: list[tuple[float, int]] = []
if not args.alone:

    def watch(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Notes when a bucket is ready and how large it is, then does what DDP would have done."""
        buckets.append((time.perf_counter(), bucket.buffer().nbytes))
        return allreduce_hook(None, bucket)

    trained.register_comm_hook(None, watch)


def step() -> tuple[float, float, float]:
    """One step. Returns this rank's loss, and when backward began and ended."""
    x, y = torch.randn(32, 512, generator=data), torch.randint(10, (32,), generator=data)
    buckets.clear()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(trained(x), y)
    begin = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    optimizer.step()
    return loss.item(), begin, end


def say(text: str) -> None:
    """Prints what each rank has to say, in their order."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if rank == 0:
        print(*texts, sep="\n", flush=True)


for number in range(1, args.steps + 1):
    own, begin, end = step()
    mean = torch.tensor(own)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    weights = zlib.crc32(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    say(f"step {number} rank {rank}: loss {own:.4f}, mean loss {mean:.4f}, weights {weights:#010x}")

tries = []  # one step may be disturbed by another program
for _ in range(args.tries if not args.alone else 0):
    _, begin, end = step()
    tries.append((end - begin, begin, buckets.copy()))
if rank == 0 and tries:
    backward_s, begin, sent = min(tries)
    for at, size in sent:
        print(f"bucket of {size / 1e6:5.2f} MB, ready after {(at - begin) / backward_s:4.0%} of backward")
    total = sum(size for _, size in sent)
    print(f"{len(sent)} bucket{'s' * (len(sent) > 1)}, {total / 1e6:.2f} MB of gradients")
    if args.guess is not None:
        print(verdict(args.guess, len(sent)))

if args.profile:
    profiles = []
    for _ in range(args.tries):
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            _, begin, end = step()
        profiles.append((end - begin, prof.key_averages()))
    if rank == 0:
        for event in sorted(min(profiles, key=lambda one: one[0])[1], key=lambda event: event.key):
            if event.key.startswith("potluck:all_reduce"):
                calls = f"{event.count} call{'s' * (event.count > 1)}, together"
                print(f"{event.key:28} {calls:>18} {event.cpu_time_total / 1e3:8.1f} ms")
dist.destroy_process_group()
