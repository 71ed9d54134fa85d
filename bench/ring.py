"""All-reduce by owners, by the ring and direct, between lab machines: which is quicker where.

    python bench/ring.py [--machines 2,3,4] [--mbit 1000,200] [--sizes 1M,64M] [--repeats 5] [--json FILE]

Needs root or user namespaces. Every machine has one rank and a link of so many Mbit/s to a switch. The algorithms
take turns within one process; a row has their median times, the time that 2(N-1)/N of the tensor takes on the bare
line, and whether all ranks got the same bits. Exit status 1 where they did not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

from potluck.lab.namespaces import NamespaceBox
from potluck.spec.rig import Machine, Rig, Workload
from potluck.units import bytes_text

SOURCE = str(Path(__file__).resolve().parents[1] / "src")
ALGORITHMS = ("owners", "ring", "direct")
UNITS = {"K": 1 << 10, "M": 1 << 20}
LIMIT_S = 230.0
PORT = 29_500


def size(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def rank_main(sizes: list[int], algorithms: list[str], repeats: int) -> None:
    """One rank; the first prints a line of JSON for each size."""
    import torch
    import torch.distributed as dist

    import potluck
    from potluck.dist import Config

    assert potluck.__version__
    torch.set_num_threads(1)
    dist.init_process_group("potluck", timeout=timedelta(seconds=120))
    groups = {name: dist.new_group(pg_options=Config(algorithm=name)) for name in algorithms}
    for nbytes in sizes:
        torch.manual_seed(dist.get_rank())
        mine = torch.randn(nbytes // 4)
        values = torch.empty_like(mine)
        times: dict[str, list[float]] = {name: [] for name in algorithms}
        alike = True
        for turn in range(repeats + 1):
            for name, group in groups.items():
                values.copy_(mine)
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(values, group=group)
                dist.barrier()
                if turn:
                    times[name].append(time.perf_counter() - began)
                else:
                    found: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(found, zlib.crc32(values.numpy()))
                    alike = alike and len(set(found)) == 1
        if dist.get_rank() == 0:
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            print("@" + json.dumps({"nbytes": nbytes, "alike": alike, "s": medians, "all_s": times}), flush=True)
    dist.destroy_process_group()


def rig(machines: int, mbit: float | None) -> Rig:
    names = [f"m{number}" for number in range(machines)]
    members = tuple(
        Machine(name=name, role="guest" if number else "host", link_mbit=mbit) for number, name in enumerate(names)
    )
    return Rig(name="ring", about="one rank on each machine", workload=Workload(), machines=members)


def measure(machines: int, mbit: float | None, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    with NamespaceBox(rig(machines, mbit)) as box:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": box.address("m0"), "MASTER_PORT": str(PORT)}
        env |= {"WORLD_SIZE": str(machines), "PYTHONPATH": SOURCE}
        command = [sys.executable, __file__, "--rank", "--sizes", args.sizes, "--algorithms", args.algorithms]
        command += ["--repeats", str(args.repeats)]
        logs = [folder / f"{machines}-{mbit}-{rank}.log" for rank in range(machines)]
        ranks = [
            box.start(f"m{rank}", command, env={**env, "RANK": str(rank), "LOCAL_RANK": "0"}, log=log)
            for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + LIMIT_S
        for process, log in zip(ranks, logs, strict=True):
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise SystemExit(f"a rank failed:\n{log.read_text()[-3000:]}")
    for line in logs[0].read_text().splitlines():
        if line.startswith("@"):
            row = json.loads(line[1:])
            wire_s = 2 * (machines - 1) / machines * row["nbytes"] * 8 / (mbit * 1e6) if mbit else None
            rows.append({"machines": machines, "mbit": mbit, "wire_s": wire_s, **row})
            taken = "  ".join(f"{name} {seconds * 1e3:8.1f} ms" for name, seconds in row["s"].items())
            line_ms = f"{wire_s * 1e3:8.1f} ms" if wire_s else "-"
            place = f"{machines} machines  {f'{mbit:g} Mbit/s' if mbit else 'unshaped':>12}"
            print(
                f"{place}  {bytes_text(row['nbytes']):>9}  {taken}  line {line_ms}"
                f"  {'same bits' if row['alike'] else 'RANKS DIFFER'}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="3,4")
    parser.add_argument("--mbit", default="1000", help="of each machine's link; 0: as fast as this box is")
    parser.add_argument("--sizes", default="64M")
    parser.add_argument("--algorithms", default="owners,ring", help="of " + ", ".join(ALGORITHMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main([size(text) for text in args.sizes.split(",")], args.algorithms.split(","), args.repeats)
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="potluck-ring-") as folder:
        for machines in args.machines.split(","):
            for mbit in args.mbit.split(","):
                rows += measure(int(machines), float(mbit) or None, args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["alike"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
