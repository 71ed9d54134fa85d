"""Desk and Mac at full size, and a guest on real cores: everything that is paced, at once.

    python bench/gpu/desk.py [--steps 12]

The host is this GPU held back to an RTX 4070 (40,000 tokens/s of GPT-2 124M), the guest another process on it held
back to an M2 (an eighth of that), half a million tokens a step, 1 Gbit/s through the shaping proxy, encrypted,
int4. All mathematics is real. The runs go on side by side: what they really compute takes little of the GPU's time.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from _runs import GLOBAL_BATCH, GPT2, HERE, SEQUENCE, Event, Run, mean_step_s, say

from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import LinkSpec
from potluck.wire.token import Token, decode, encode

HOST_S = SEQUENCE / 40_000
GUEST_S = 8 * HOST_S
GOODPUT_MBIT = 941.0
"""What TCP carries over 1 Gbit/s Ethernet."""
MICRO_BATCH, CPU_THREADS = 8, 6
ON = "@cuda"
SKIP, SKIP_DDP = 4, 1
IDEAL = 1 + HOST_S / GUEST_S


def host_device(seconds: float) -> list[str]:
    return ["--device", f"paced:{seconds}{ON}", "--micro-batch", str(MICRO_BATCH), "--threads", "1"]


class Desk:
    """All runs, started together and ended together."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        link = LinkSpec(name="guest", rate_bytes_per_s=GOODPUT_MBIT * 125_000, latency_s=0.0002)
        self._links = []
        for name in ("potluck", "cpu"):
            (folder / name).mkdir()
            self._links.append(ProxyProcess([link], folder=folder / name))
        self.runs: dict[str, Run] = {}

    def start(self) -> None:
        steps = ["--steps", "1000"]
        eager = ["--set", "compile=no"]
        self._run("alone").host(*GPT2, *steps, *eager, *host_device(HOST_S))
        together = self._run("potluck")
        together.host(*GPT2, *steps, *eager, *host_device(HOST_S), "--wait-for", "1", "--wait-s", "200")
        real = self._run("cpu")
        real.host(*GPT2, *steps, *eager, *host_device(HOST_S), "--wait-for", "1", "--wait-s", "200")
        self._ddp("ddp", (GLOBAL_BATCH // 2, GLOBAL_BATCH // 2))
        guest = round(GLOBAL_BATCH / 9)
        self._ddp("ddp-balanced", (GLOBAL_BATCH - guest, guest))
        paced = ["--device", f"paced:{GUEST_S}{ON}", "--threads", "1", "--micro-batch", "4"]
        together.guest("mac", self._through(0, together.token()), *paced)
        cores = ["--device", "cpu", "--threads", str(CPU_THREADS), "--micro-batch", "2"]
        real.guest("cores", self._through(1, real.token()), *cores)

    def _run(self, name: str) -> Run:
        self.runs[name] = Run(self._folder / name)
        return self.runs[name]

    def _through(self, link: int, token_file: Path) -> Path:
        """A token that leads through the proxy."""
        token: Token = decode(token_file.read_text().strip())
        port = self._links[link].open("guest", (token.addresses[0], token.port))
        through = Token(
            addresses=("127.0.0.1",), port=port, host_public=token.host_public, guest_secret=token.guest_secret
        )
        path = self._folder / f"token-{link}"
        path.touch(mode=0o600)
        path.write_text(encode(through))
        return path

    def _ddp(self, name: str, shares: tuple[int, int]) -> None:
        run = self._run(name)
        run.folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = {"depth": 12, "sequence": SEQUENCE, "batch_tokens": SEQUENCE * GLOBAL_BATCH, "steps": 1000}
        machines = (("host", HOST_S, MICRO_BATCH), ("mac", GUEST_S, 4))
        members = [
            {
                "name": name,
                "device": f"paced:{seconds}{ON}",
                "micro_batch": size,
                "share": share,
                "address": "127.0.0.1",
            }
            for (name, seconds, size), share in zip(machines, shares)
        ]
        spec = {
            "recipe": {"name": "gpt", "config": config},
            "members": members,
            "steps": 1000,
            "seed": 1,
            "master_address": "127.0.0.1",
            "master_port": port,
            "interface": "lo",
            "out": str(run.folder / "steps.jsonl"),
        }
        path = run.folder / "spec.json"
        path.write_text(json.dumps(spec))
        for rank in (0, 1):
            words = ["--spec", str(path), "--rank", str(rank), "--mbit", str(GOODPUT_MBIT)]
            run.start(f"rank-{rank}", [sys.executable, str(HERE / "ddp_rank.py"), *words])

    def ddp_steps(self, name: str) -> list[Event]:
        path = self.runs[name].folder / "steps.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait(self) -> None:
        """Until the slowest has what it needs; what is missing then is missing from the table."""
        for name, steps in (("potluck", self._steps), ("cpu", self._steps - 2), ("alone", 5)):
            self._patiently(name, lambda run=self.runs[name], n=steps: len(run.events("step")) >= n, 240.0)
        self._patiently("ddp-balanced", lambda: len(self.ddp_steps("ddp-balanced")) >= 4, 30.0)
        self._patiently("ddp", lambda: len(self.ddp_steps("ddp")) >= 2, 60.0)

    def _patiently(self, name: str, found: Any, within_s: float) -> None:
        try:
            self.runs[name].wait(found, within_s, "result")
        except RuntimeError as error:
            say(str(error))

    def end(self) -> None:
        for run in self.runs.values():
            run.end()
        for link in self._links:
            link.close()


def table(desk: Desk) -> list[str]:
    alone = mean_step_s(desk.runs["alone"].events("step")[:8], 1)
    lines = [
        f"host alone {alone:.3f} s a step ({SEQUENCE * GLOBAL_BATCH / alone:,.0f} tokens/s); ideal {IDEAL:.3f}",
        "| strategy | s a step | speed-up | samples: host + guest |",
        "|---|---|---|---|",
        f"| host alone | {alone:.3f} | 1.000 | {GLOBAL_BATCH} |",
    ]
    for name, skip in (("ddp", SKIP_DDP), ("ddp-balanced", SKIP_DDP)):
        steps = desk.ddp_steps(name)
        if len(steps) <= skip:
            lines.append(f"| {name} | not enough steps | | |")
            continue
        seconds, shares = mean_step_s(steps, skip), steps[-1]["samples"]
        lines.append(f"| {name} | {seconds:.3f} | {alone / seconds:.3f} | {shares['host']} + {shares['mac']} |")
    for name, label in (("potluck", "**potluck**"), ("cpu", f"potluck, guest on {CPU_THREADS} real cores")):
        steps = desk.runs[name].events("step")
        if len(steps) <= SKIP:
            lines.append(f"| {label} | not enough steps | | |")
            continue
        seconds = mean_step_s(steps, SKIP)
        slowest = max(e["step_s"] for e in steps[SKIP:])
        guests = [sum(n for who, n in e["samples"].items() if who != "host") for e in steps[SKIP:]]
        mean = sum(guests) / len(guests)
        lines.append(
            f"| {label} | {seconds:.3f} (slowest {slowest:.3f}) | {alone / seconds:.3f} |"
            f" {GLOBAL_BATCH - mean:.1f} + {mean:.1f} |"
        )
    for name in ("potluck", "cpu"):
        for event in desk.runs[name].events("guest_joined"):
            lines.append(
                f"{name}: {event['machine']} on {event['device']}, cosine of gradients {event['parity']:.5f}"
            )
        for kind in ("guest_sits_out", "lease_taken_back", "contribution_dropped", "guest_left", "guest_refused"):
            for event in desk.runs[name].events(kind)[:3]:
                lines.append(f"{name}: {kind}: {event.get('reason')}")
    return lines


def measure(steps: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder), steps)
        try:
            desk.start()
            desk.wait()
            return table(desk)
        finally:
            desk.end()


def main() -> None:
    parser = argparse.ArgumentParser(description="Desk and Mac at full size.")
    parser.add_argument("--steps", type=int, default=12)
    print("\n".join(measure(parser.parse_args().steps)))


if __name__ == "__main__":
    main()
