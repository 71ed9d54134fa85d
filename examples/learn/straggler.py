"""Two unequal machines and a barrier: python examples/learn/straggler.py --shares 8,8

Each process needs its own time for a sample; sleeping takes the place of computing. At the end of a step all wait
for all, as DDP does in its all-reduce.
"""

import argparse
import multiprocessing
import time

from guess import verdict


def machine(index: int, sample_s: float, share: int, steps: int, barrier: object, results: object) -> None:
    barrier.wait(60)  # begin together
    begin, waited_s = time.monotonic(), 0.0
    for _ in range(steps):
        time.sleep(sample_s * share)
        came = time.monotonic()
        barrier.wait(60)
        waited_s += time.monotonic() - came
    results.put((index, (time.monotonic() - begin) / steps, waited_s / steps))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--speeds", default="0.02,0.08", help="seconds that each machine needs for a sample")
    options.add_argument("--shares", default="8,8", help="samples of each machine in a step")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--guess", type=float, help="speed-up over the first machine alone, as you expect it")
    args = options.parse_args()
    speeds = [float(speed) for speed in args.speeds.split(",")]
    shares = [int(share) for share in args.shares.split(",")]

    barrier, results = multiprocessing.Barrier(len(speeds)), multiprocessing.Queue()
    machines = [
        multiprocessing.Process(target=machine, args=(index, speed, share, args.steps, barrier, results))
        for index, (speed, share) in enumerate(zip(speeds, shares))
    ]
    for one in machines:
        one.start()
    rows = sorted(results.get(timeout=120) for _ in machines)
    for one in machines:
        one.join()

    step_s = max(step_s for _, step_s, _ in rows)
    for index, _, waited_s in rows:
        print(f"machine {index}   {shares[index]} samples, waits {waited_s:.2f} s of {step_s:.2f} s")
    alone_s = speeds[0] * sum(shares)
    speedup = alone_s / step_s
    print(f"step        {step_s:.2f} s; machine 0 alone would need {alone_s:.2f} s: speed-up {speedup:.2f}")
    if args.guess is not None:
        print(verdict(args.guess, speedup))


if __name__ == "__main__":
    main()
