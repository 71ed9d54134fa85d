"""The default codecs cost nothing: int4 and thin both ways end where three seeds without a codec end.

Where a model's gradient does not tolerate int4's rounding of the weights, auto sends them in fp16.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.fleet import Fleet
from support.processes import TestProcess

JOB = Path(__file__).parents[1] / "support" / "three_seeds.py"
SINES = Path(__file__).parents[1] / "support" / "sine_job.py"
STEPS, BATCH = 40, 16
DEVICE = ["--device", "paced:0.03", "--micro-batch", "4"]


def start(fleet: Fleet, codec: str, out: Path) -> list[TestProcess]:
    host = fleet.host(JOB, "--wait-for", "1", "--codec", codec, *DEVICE, arguments=["--steps", STEPS, "--out", out])
    return [host, fleet.guest("ann", *DEVICE)]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_int4_and_thin_both_ways_end_within_the_spread_of_three_seeds(tmp_path: Path) -> None:
    losses, sent = {}, {}
    with ExitStack() as stack:
        fleets = {codec: stack.enter_context(Fleet(tmp_path / codec)) for codec in ("none", "int4", "thin")}
        outs = {codec: tmp_path / f"{codec}.json" for codec in fleets}
        started = {codec: start(fleet, codec, outs[codec]) for codec, fleet in fleets.items()}
        for codec, fleet in fleets.items():
            for process in started[codec]:
                process.succeeds(deadline_s=150)
            fleet.assert_every_step_is_full(global_batch=BATCH, steps=STEPS)
            share = sum(e["samples"].get("ann", 0) for e in fleet.steps()) / (STEPS * BATCH)
            assert share > 0.15, f"the guest computed only {share:.0%} with {codec}"
            losses[codec] = json.loads(outs[codec].read_text())
            sent[codec] = sum(e["bytes_up"] for e in fleet.steps()[5:])
    spread = max(losses["none"]) - min(losses["none"])
    # Seed by seed, which is sharper than the means: the same weights at first, the same samples, another codec.
    for codec in ("int4", "thin"):
        differences = [coded - exact for coded, exact in zip(losses[codec], losses["none"])]
        assert max(differences) < spread, f"{losses}"
        assert sum(losses[codec]) / 3 < max(losses["none"]), f"{losses}"
    assert sent["thin"] < 0.65 * sent["int4"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("codec", ["auto", "int4"])
def test_weights_that_int4_rounds_too_much_for_the_model_go_in_fp16_with_auto(codec: str, tmp_path: Path) -> None:
    enough, config = tmp_path / "enough", tmp_path / "run.toml"
    config.write_text("[run]\ncheck_replica_every = 3\n")
    device = ["--device", "paced:0.03", "--micro-batch", "4"]
    with Fleet(tmp_path) as fleet:
        host = fleet.host(
            SINES, "--config", str(config), "--wait-for", "1", "--codec", codec, *device, arguments=[enough]
        )
        ann = fleet.guest("ann", *device)

        def notes() -> list[str]:
            return [e["text"] for e in fleet.events("note", "ann") if "the codec has rounded" in e["text"]]

        (text,) = fleet.wait_for(host, notes, "a note on the rounding", 60.0)
        fix = "weights are sent in fp16 from now on" if codec == "auto" else "--codec fp16 rounds less"
        assert text.endswith(fix)
        told = fleet.step_reached()
        fleet.wait_for(host, lambda: [s for s in fleet.steps_with("ann") if s > told + 1], "its help", 60.0)
        enough.touch()
        host.succeeds(deadline_s=30)
        ann.succeeds(deadline_s=30)
        fleet.assert_every_step_is_full(global_batch=BATCH)
        assert not fleet.events("guest_lost")
        assert len(notes()) == 1, "in fp16 as well"
