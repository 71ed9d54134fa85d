"""The figures of a run: what is shown of the guests only once there is something to show."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from potluck.hub.feed import Feed
from potluck.hub.members import Member
from potluck.hub.stepping import StepResult
from potluck.train.launch import HOST
from potluck.train.telemetry import Telemetry


def test_no_speed_up_is_claimed_before_a_guest_has_contributed() -> None:
    events: list[dict[str, Any]] = []
    guest = Member(
        id="g",
        name="laptop",
        address="",
        device="cpu",
        about={},
        last_heard=0.0,
        joined_at=0.0,
        feed=Feed(pieces=1, window_bytes=1),
    )
    device = SimpleNamespace(peak_flops=None, label="cpu")
    launch: Any = SimpleNamespace(role=HOST, name="tower", device=device, log=SimpleNamespace(emit=events.append))
    options: Any = SimpleNamespace(global_batch=8, steps=9, tokens_per_sample=None)
    hub: Any = SimpleNamespace(members=lambda: [guest], host_sample_s=lambda: 0.1, traffic=lambda: (0, 0))
    result = StepResult(samples={"tower": 8}, predicted_s=None, wait_s=0.0, dropped_samples=0, taken_back_samples=0)
    telemetry = Telemetry(launch, options, hub)
    telemetry.step_ended(1, 1.0, result, 0.0, time.monotonic(), applied=True)
    guest.samples = 3
    telemetry.step_ended(2, 1.0, result, 0.0, time.monotonic(), applied=True)
    before, after = (event["speedup"] for event in events)
    assert before is None
    assert after is not None
