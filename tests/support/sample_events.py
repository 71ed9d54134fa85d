"""Events of an imagined run, for tests of the views and the summary."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def run_start(**changes: Any) -> Event:
    return {
        "event": "run_start",
        "run_id": "1115-gpt",
        "folder": "runs/1115-gpt",
        "recipe": "gpt",
        "machine": "tower",
        "device": "cuda",
        "steps": 4,
        "global_batch": 32,
        "parameters": 10_900_000,
        "trained_parameters": 10_900_000,
        "codec": "int4",
        "micro_batch": 8,
        "tokens_per_sample": 256,
        "resumed_from": None,
        "join": True,
        **changes,
    }


def machine(name: str, samples: int, **changes: Any) -> Event:
    return {
        "name": name,
        "role": "guest",
        "device": "cpu",
        "samples": samples,
        "rate": 8.0,
        "busy": 0.9,
        "state": "computing",
        "reason": "",
        **changes,
    }


def host(samples: int = 24, **changes: Any) -> Event:
    row = machine("tower", samples, role="host", device="cuda", rate=24.0, busy=0.99)
    return row | changes


def step(number: int, **changes: Any) -> Event:
    return {
        "event": "step",
        "step": number,
        "steps": 4,
        "loss": 5.0 - number,
        "step_s": 1.0,
        "samples_per_s": 32.0,
        "tokens_per_s": 8192.0,
        "speedup": 1.25,
        "eta_s": 4.0 - number,
        "wait_s": 0.01,
        "update_s": 0.04,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "dropped": 0,
        "machines": [host(), machine("laptop", 8)],
        **changes,
    }


def run_end(**changes: Any) -> Event:
    return {
        "event": "run_end",
        "step": 4,
        "loss": 1.0,
        "seconds": 4.2,
        "samples_per_s": 31.5,
        "speedup": 1.25,
        "reason": "finished",
        "folder": "runs/1115-gpt",
        **changes,
    }


def news() -> list[Event]:
    """One of each of the other kinds."""
    laptop = {"machine": "laptop", "address": "10.0.0.7"}
    return [
        {"event": "guest_hello", **laptop, "device": "cpu"},
        {"event": "guest_joined", **laptop, "device": "cpu", "parity": 0.99998},
        {"event": "guest_left", **laptop, "reason": "its user stopped it"},
        {"event": "guest_lost", **laptop, "reason": "silent for 5 s", "samples_taken_back": 8},
        {"event": "guest_refused", **laptop, "reason": "another model"},
        {"event": "guest_sits_out", "machine": "laptop", "reason": "too slow"},
        {"event": "lease_taken_back", **laptop, "step": 2, "samples": 8, "reason": "was late"},
        {"event": "replica_mismatch", **laptop, "step": 2, "samples": 8, "reason": "held other weights"},
        {
            "event": "contribution_dropped",
            "machine": "laptop",
            "step": 2,
            "samples": 1,
            "reason": "not finite",
        },
        {
            "event": "step_not_applied",
            "machine": "tower",
            "step": 2,
            "reason": "own gradient is NaN",
            "in_a_row": 2,
        },
        {"event": "refused_stranger", "address": "10.0.0.66", "reason": "a wrong key"},
        {"event": "checkpoint", "step": 2, "path": "checkpoints/step-2", "seconds": 0.3},
        {"event": "checkpoint_failed", "step": 2, "reason": "No space left on device", "again": True},
        {"event": "checkpoint_damaged", "path": "checkpoints/step-2", "reason": "its hash is another"},
        {"event": "loop_awaited", "what": "job.py", "seconds": 61.0, "guests": 1},
        {"event": "log_failed", "path": "runs/x/events.jsonl", "reason": "No space left on device"},
        {"event": "log_gap", "lines": 3},
        {"event": "flight_recorded", "machine": "tower", "path": "runs/x/flight-tower-1.jsonl", "first": True},
        {"event": "note", "text": "a word to the reader"},
    ]


def whole_run() -> list[Event]:
    return [run_start(), *(step(n) for n in range(1, 5)), run_end()]
