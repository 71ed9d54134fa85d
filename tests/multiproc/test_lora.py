"""Only what is trained travels: with a frozen base and adapters, a step moves kilobytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fleet import Event, Fleet

SCRIPT = Path(__file__).parents[2] / "examples" / "lora.py"
INTERRUPTED = 130
BATCH = 32
FROZEN_BYTES = 4 * 3_000_000
"""The base of the example has a little more."""
DEVICE = ["--device", "paced:0.01", "--micro-batch", "2"]


def bytes_down(steps: list[Event], first: Event, last: Event) -> int:
    """What left the host from the step in which the one event fell to that of the other."""
    after = [e for e in steps if e["t_s"] > last["t_s"]][:1]
    return sum(e["bytes_down"] for e in [*(e for e in steps if first["t_s"] < e["t_s"] <= last["t_s"]), *after])


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_step_moves_kilobytes_and_the_base_travels_only_to_who_lacks_it(tmp_path: Path) -> None:
    other_base = tmp_path / "other_base.py"
    source = SCRIPT.read_text()
    assert "BASE_SEED = 1\n" in source
    other_base.write_text(source.replace("BASE_SEED = 1\n", "BASE_SEED = 2\n"))
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(SCRIPT, *DEVICE, arguments=[100_000])
        fleet.guest("ann", *DEVICE)
        ann = fleet.wait_for_event(host, "guest_joined", "ann")
        fleet.wait_for_step(host, fleet.step_reached() + 2)  # what bob is sent must not count as ann's
        # This one builds another base: same shapes, other values, as a machine without the pretrained file.
        fleet.guest("bob", *DEVICE, "--script", str(other_base))
        bob = fleet.wait_for_event(host, "guest_joined", "bob")
        fleet.wait_for(host, lambda: len(fleet.steps_with("bob")) > 5, "samples of bob")
        host.interrupt()
        host.exits_with(INTERRUPTED, deadline_s=20)
        steps = fleet.steps()
        hello = {name: fleet.events("guest_hello", name)[0] for name in ("ann", "bob")}
        start = fleet.events("run_start")[0]

    assert start["parameters"] - start["trained_parameters"] > 3_000_000
    assert start["trained_parameters"] < 20_000
    assert bytes_down(steps, hello["ann"], ann) < FROZEN_BYTES / 20
    assert bytes_down(steps, hello["bob"], bob) > FROZEN_BYTES
    # Its gradients agreed, so what it was sent is the base.
    assert bob["parity"] > 0.98

    busy = [e for e in steps if e["t_s"] > bob["t_s"] and e["samples"].get("ann") and e["samples"].get("bob")]
    assert len(busy) > 1, "no step with both guests"
    for step in busy[1:]:  # in the first the check of bob's gradient travels, too
        assert 0 < step["bytes_up"] + step["bytes_down"] < 64_000
    assert {sum(e["samples"].values()) for e in steps} == {BATCH}
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
