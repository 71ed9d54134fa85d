"""The Hugging Face Trainer in bf16 on a GPU, with a guest on the CPU: the plain Trainer's losses."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.fleet import Fleet

JOB = Path(__file__).parents[1] / "support" / "hf_job.py"
pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
STEPS = 20


def test_a_gpu_in_bf16_and_a_cpu(tmp_path: Path) -> None:
    from transformers import Trainer as PlainTrainer

    from support import hf_job

    plain = hf_job.trained(PlainTrainer, tmp_path / "plain", max_steps=STEPS, **hf_job.ON_GPU)
    expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    words = ["--out", str(tmp_path / "weights.safetensors"), "--steps", STEPS]
    with Fleet(tmp_path / "fleet") as fleet:
        paced = ["--device", "paced:0.02@cuda", "--micro-batch", "2"]
        host = fleet.host(JOB, "--wait-for", "1", *paced, arguments=[*words, "--gpu"])
        ann = fleet.guest("ann", "--device", "cpu", env={"CUDA_VISIBLE_DEVICES": ""})
        host.succeeds(deadline_s=100)
        ann.succeeds(deadline_s=20)
        assert len(fleet.steps_with("ann")) > STEPS / 2
        assert [event["loss"] for event in fleet.steps()] == pytest.approx(expected, rel=0.02)
