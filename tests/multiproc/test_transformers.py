"""The Hugging Face Trainer on Potluck: the plain Trainer's weights, alone and with a guest; what is refused."""

from __future__ import annotations

import dataclasses
import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck.errors import ConfigError, LoopError
from potluck.train.ending import GuestDone, Interrupted
from support.brief_guests import MOST_STEPS, brief_guests

if TYPE_CHECKING:
    import tokenizers
    import transformers
    from transformers import Trainer as PlainTrainer

    from potluck.integrations.transformers import Trainer, potluck_trainer
    from support import hf_job

JOB = Path(__file__).parents[1] / "support" / "hf_job.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Imported for these tests only: it takes seconds, and every worker of pytest looks at this file."""
    global PlainTrainer, Trainer, hf_job, potluck_trainer, tokenizers, transformers
    import tokenizers
    import transformers
    from transformers import Trainer as PlainTrainer

    from potluck.integrations.transformers import Trainer, potluck_trainer
    from support import hf_job


def callback(**events: Any) -> Any:
    """A callback of the Trainer that hears these events."""
    methods = {name: staticmethod(function) for name, function in events.items()}
    return type("Callback", (transformers.TrainerCallback,), methods)()


def in_parts(*given: Any, **keywords: Any) -> Any:
    """Potluck's Trainer in micro-batches of 3, so that what they weigh matters."""
    return Trainer(*given, run=potluck.start(device="cpu", threads=1, micro_batch=3), **keywords)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hf_job.trained(PlainTrainer, tmp_path_factory.mktemp("plain"))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_figures(found: Any, expected: Any) -> None:
    """To the digits that do not depend on the order of a sum."""
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    ours, plain = (
        [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]
        for trainer in (found, expected)
    )
    assert len(ours) == len(plain)
    for entry, wanted in zip(ours, plain, strict=True):
        assert entry == pytest.approx(wanted, abs=1e-4)


def test_alone_it_is_the_plain_trainer(plain: Any, tmp_path: Path) -> None:
    ours = hf_job.trained(in_parts, tmp_path)
    assert_same(hf_job.weights(ours), hf_job.weights(plain))
    assert_same_figures(ours, plain)


@pytest.mark.timeout(240)
def test_guests_that_come_and_go_change_nothing(tmp_path: Path) -> None:
    """Two at once. They join while the training runs, and leave while it runs on. Samples are of unequal length."""

    def stopped(kind: Any, out: Path, enough: Callable[[int], bool]) -> Any:
        def ends(args: Any, state: Any, control: Any, **ignored: Any) -> None:
            control.should_training_stop = enough(state.global_step)

        made = functools.partial(kind, callbacks=[callback(on_step_end=ends)])
        return hf_job.trained(made, out, max_steps=MOST_STEPS, learning_rate=0.005)

    with brief_guests(tmp_path / "fleet", JOB) as guests:
        hosted = functools.partial(Trainer, run=guests.run)
        ours = stopped(hosted, tmp_path, guests.after_step)
    plain = stopped(PlainTrainer, tmp_path / "plain", lambda step: step == ours.state.global_step)
    guests.assert_came_and_went([8] * 5 + [4])
    assert_same(hf_job.weights(ours), hf_job.weights(plain))
    assert_same_figures(ours, plain)


def test_it_resumes_from_its_own_checkpoint(plain: Any, tmp_path: Path) -> None:
    hf_job.trained(in_parts, tmp_path, save_strategy="steps", save_steps=8)
    checkpoint = str(tmp_path / "checkpoint-8")
    ours = hf_job.trained(in_parts, tmp_path / "again", resume=checkpoint, dataloader_num_workers=1)
    assert_same(hf_job.weights(ours), hf_job.weights(plain))
    assert ours.state.global_step == plain.state.global_step


def test_lora_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    plain = hf_job.trained(PlainTrainer, tmp_path / "plain", lora=True, max_steps=8)
    ours = hf_job.trained(in_parts, tmp_path, lora=True, max_steps=8)
    found = hf_job.weights(ours)
    assert_same(found, hf_job.weights(plain))
    assert found
    assert all("lora" in name for name in found)


def test_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--steps", "30", "--out", str(tmp_path)])
    made = runpy.run_path(str(EXAMPLE))
    assert made["losses"][-1] < made["losses"][0] - 0.1
    assert (tmp_path / "adapter_model.safetensors").exists()


def sft(kind: Any, out: Path, *, data: Any = None, **keywords: Any) -> Any:
    """A trainer of TRL on texts."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    words = {f"w{number}": number for number in range(hf_job.WORDS)}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = [{"text": " ".join(f"w{n}" for n in sample["input_ids"])} for sample in hf_job.data()]
    own = {"max_length": 24, "bf16": False, "gradient_checkpointing": False}
    given = hf_job.settings(out, max_steps=8, learning_rate=0.01, **own)
    return kind(
        model=hf_job.model(),
        args=trl.SFTConfig(**given),
        train_dataset=data or pytest.importorskip("datasets").Dataset.from_list(texts),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=splitter, pad_token="w0", eos_token="w1", unk_token="w0"
        ),
        **keywords,
    )


def test_the_sft_trainer_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    run = potluck.start(device="cpu", threads=1, micro_batch=3)
    ours, plain = sft(potluck_trainer(trl.SFTTrainer), tmp_path, run=run), sft(trl.SFTTrainer, tmp_path)
    ours.train()
    plain.train()
    assert_same(hf_job.weights(ours), hf_job.weights(plain))


def test_the_sft_trainer_of_trl_on_a_guest(tmp_path: Path) -> None:
    """It is made from its data set there too: a function that returns one is refused before it is called."""
    kind = potluck_trainer(pytest.importorskip("trl", reason="trl is not installed").SFTTrainer)
    batch = hf_job.padded(hf_job.data()[:2])

    class Given(Step):
        def __iter__(self) -> Iterator[Any]:
            yield batch

        def backward(self, loss: Tensor, items: Any = None) -> None:
            loss.backward()

    class OneStep(Guest):
        def steps(self, model: Any, *given: Any, **keywords: Any) -> Iterator[Any]:
            yield Given()
            raise GuestDone("the run is over")

    trainer = sft(kind, tmp_path, run=OneStep())
    with pytest.raises(GuestDone):
        trainer.train()
    assert all(p.grad is not None for p in trainer.model.parameters())
    with pytest.raises(ConfigError, match="reads its data set in its constructor") as refused:
        sft(kind, tmp_path, run=OneStep(), data=lambda: pytest.fail("it was called"))
    assert "the data set itself" in (refused.value.hint or "")


# -- a model that takes no items --------------------------------------------------------------------------------


class Line(nn.Module):
    """Its loss is the mean over the samples; it takes no number of items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.layer(x).squeeze(-1) - labels) ** 2).mean()}


def line_data() -> list[dict[str, Any]]:
    points = torch.randn(44, 3, generator=torch.Generator().manual_seed(2))
    return [{"x": x, "labels": float(x.sum())} for x in points]


def line(kind: Any, out: Path, *callbacks: Any, **changed: Any) -> Any:
    return kind(
        model=Line(),
        args=hf_job.arguments(out, **{"gradient_accumulation_steps": 1, "max_steps": 8, **changed}),
        train_dataset=line_data,
        callbacks=list(callbacks),
    )


def plain_line(**given: Any) -> Any:
    return PlainTrainer(**{**given, "train_dataset": given["train_dataset"]()})


def test_a_model_without_items_has_the_mean_over_samples(tmp_path: Path) -> None:
    ours, plain = line(in_parts, tmp_path), line(plain_line, tmp_path)
    ours.train()
    plain.train()
    assert_same(hf_job.weights(ours), hf_job.weights(plain))


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from line_data()


def test_a_stream(tmp_path: Path) -> None:
    found = []
    for kind in (PlainTrainer, in_parts):
        trainer = kind(
            model=Line(), args=hf_job.arguments(tmp_path, gradient_accumulation_steps=1), train_dataset=Stream()
        )
        trainer.train()
        found.append(hf_job.weights(trainer))
    assert_same(*found)


class Guest:
    """A run on a guest that is given one step with one batch."""

    is_guest, device = True, torch.device("cpu")

    def steps(self, model: Any, *given: Any, **keywords: Any) -> Iterator[Any]:
        yield Step()
        raise GuestDone("the run is over")


class Step:
    index = 7

    def __iter__(self) -> Iterator[Any]:
        first = line_data()[0]
        yield {"x": first["x"].unsqueeze(0), "labels": torch.tensor([first["labels"]])}

    def backward(self, loss: Tensor, items: Any = None) -> None: ...


def test_on_a_guest_it_reports_saves_and_reads_nothing(tmp_path: Path) -> None:
    def data() -> Any:
        raise AssertionError("a guest opened the data set")

    args = hf_job.arguments(
        tmp_path / "out", eval_strategy="steps", save_strategy="steps", push_to_hub=True, disable_tqdm=False
    )
    ours = callback()
    args.report_to = ["wandb"]  # which is not installed
    at: list[int] = []

    class Looks(Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **keywords: Any) -> Any:
            at.append(self.state.global_step)
            return super().compute_loss(*given, **keywords)

    trainer = Looks(model=Line(), args=args, train_dataset=data, callbacks=[ours], run=Guest())
    assert trainer.args.report_to == []
    assert ours not in trainer.callback_handler.callbacks
    assert trainer.train_dataset is None
    assert not (tmp_path / "out").exists()
    assert args.report_to == ["wandb"], "the script's own arguments stay as they were"
    with pytest.raises(GuestDone):
        trainer.train()
    assert at == [7], "a loss may depend on the step's number"


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    class Spoils(Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*given, **keywords)
            return loss * float("nan") if self.state.global_step == 3 else loss

    seen: list[Tensor] = []

    def looks(*ignored: Any, model: Any, **also: Any) -> None:
        seen.append(model.layer.weight.detach().clone())

    trainer = line(Spoils, tmp_path, callback(on_step_end=looks))
    trainer.train()
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[3], seen[4])
    assert bool(seen[-1].isfinite().all())


@pytest.mark.parametrize("interruption", [Interrupted, KeyboardInterrupt])
def test_ctrl_c_ends_it_after_the_step_with_a_checkpoint(
    interruption: type[KeyboardInterrupt], tmp_path: Path
) -> None:
    """A script that hosts ends with KeyboardInterrupt itself: only then Python has the status of Ctrl-C."""
    run = potluck.start(device="cpu", threads=1)
    run._context = dataclasses.replace(run._context, interruption=interruption)

    def asks(args: Any, state: Any, control: Any, **ignored: Any) -> None:
        if state.global_step == 3:
            run._context.loop.request_stop()

    trainer = line(functools.partial(Trainer, run=run), tmp_path, callback(on_step_begin=asks))
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    assert stopped.type is interruption
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_resumed_run_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    began: list[int] = []

    def begins(args: Any, state: Any, control: Any, **ignored: Any) -> None:
        began.append(state.global_step)

    for resumed, steps in ((False, 4), (True, 6)):
        run = potluck.start(device="cpu", threads=1)
        run._context = dataclasses.replace(run._context, resume=resumed)
        kind = functools.partial(Trainer, run=run)
        line(
            kind, tmp_path, callback(on_train_begin=begins), max_steps=steps, save_strategy="steps", save_steps=2
        ).train()
    assert began == [0, 4]


# -- what is refused --------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "FSDP": ({"fsdp": "full_shard"}, "holds the whole model"),
    "DeepSpeed": ({"deepspeed": {"zero_optimization": {}}}, "holds the whole model"),
    "tensor": ({"parallelism_config": object()}, "holds the whole model"),
    "DataParallel": ({"_n_gpu": 2}, "CUDA_VISIBLE_DEVICES=0"),
    "fp16": ({"fp16": True}, "bf16=True"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "measures what fits"),
    "activation_offloading": ({"activation_offloading": True}, "gradient_checkpointing"),
    "include_num_input_tokens_seen": ({"include_num_input_tokens_seen": "all"}, "padding differs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_are_refused(what: str, tmp_path: Path) -> None:
    changed, instead = REFUSED[what]
    args = hf_job.arguments(tmp_path)
    for name, value in changed.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=what) as refused:
        Trainer(model=Line(), args=args)
    assert instead in (refused.value.hint or "")


def test_other_launchers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="torchrun or accelerate launch") as refused:
        Trainer(model=Line(), args=hf_job.arguments(tmp_path))
    assert "potluck host" in (refused.value.hint or "")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MULTI_CPU"])
def test_what_accelerate_was_set_up_for_is_refused(kind: str) -> None:
    """By `accelerate config` or its variables, which no argument of the Trainer shows."""
    from accelerate.utils import DistributedType

    from potluck.integrations.transformers import refuse_accelerator

    with pytest.raises(ConfigError, match=f"Accelerate was set up for {kind}") as refused:
        refuse_accelerator(SimpleNamespace(distributed_type=DistributedType(kind)))
    assert "potluck host" in (refused.value.hint or "")


def test_trainers_that_generate_are_refused() -> None:
    class GRPOTrainer(PlainTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self) -> None: ...

    with pytest.raises(LoopError, match="GRPOTrainer generates text inside its steps"):
        potluck_trainer(GRPOTrainer)
    assert issubclass(potluck_trainer(transformers.Seq2SeqTrainer), Trainer)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match="Line is not a Hugging Face Trainer"):
        potluck_trainer(Line)


def test_another_device_than_potluck_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = potluck.start(device="cpu", threads=1)
    monkeypatch.setattr(type(run), "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="computes on cpu, and Potluck on cuda"):
        Trainer(model=Line(), args=hf_job.arguments(tmp_path), run=run)
