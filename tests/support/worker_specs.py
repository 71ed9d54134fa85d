"""The spec.json of a lab's worker whose members are all on this machine; `more` has at least `steps` and `seed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from potluck.fleet.ranks import free_port


def write_worker_spec(folder: Path, config: dict[str, Any], members: list[dict[str, Any]], **more: Any) -> Path:
    spec = {
        "recipe": {"name": "gpt", "config": config},
        "members": [{**member, "address": "127.0.0.1"} for member in members],
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "interface": "lo",
        "out": str(folder / "steps.jsonl"),
        "threads": 1,
        "weights": str(folder / "weights.safetensors"),
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec | more))
    return path
