"""What a script gives to run.steps: what cannot work is said in words before the first step."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from potluck.device import pick
from potluck.errors import ConfigError, LoopError, RunFolderError
from potluck.report.summary import read_events
from potluck.spec.config import RunConfig
from potluck.spec.events import RunNote
from potluck.train.context import ALONE, GUEST, RunContext
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder, new_folder
from potluck.train.run import Run
from support import sample_events as sample

SAMPLES = [torch.full((2,), float(i)) for i in range(8)]


def launched(folder: Path | None = None, *, resume: bool = False) -> RunContext:
    run_folder = RunFolder(folder) if folder is not None else None
    log = EventLog(run_folder.events if run_folder is not None else None)
    config = RunConfig(checkpoint_every=0)
    return RunContext(
        role=ALONE, config=config, device=pick("cpu"), name="here", log=log, folder=run_folder, resume=resume
    )


def trained(model: Any, optimizer: Any, context: RunContext | None = None, **keywords: Any) -> list[float]:
    """Train; the learning rate after each step."""
    rates = []
    keywords = {"global_batch": 4, "micro_batch": 4, "steps": 3, **keywords}
    for step in Run(context or launched()).steps(model, optimizer, SAMPLES, **keywords):
        for batch in step:
            step.backward(model(batch).square().mean())
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def sgd(model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


class Wanting:
    """A scheduler in the manner of another library."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise AssertionError("called without an epoch")


def given(what: str) -> tuple[Any, Any, dict[str, Any]]:
    model = nn.Linear(2, 1)
    optimizer: Any = sgd(model)
    keywords: dict[str, Any] = {}
    match what:
        case "list":
            optimizer = [optimizer, sgd(model)]
        case "none":
            optimizer = None
        case "lbfgs":
            optimizer = torch.optim.LBFGS(model.parameters())
        case "another model's":
            optimizer = sgd(nn.Linear(2, 1))
        case "a stray parameter":
            return model, sgd(nn.ParameterList([*model.parameters(), nn.Parameter(torch.zeros(3))])), {}
        case "swapped":
            return optimizer, model, {}
        case "data parallel":
            model = nn.DataParallel(model)
        case "a wrong keyword":
            keywords["by_train"] = True
        case "epochs in words":
            keywords["epochs"] = "3"
        case "data":
            keywords["data"] = "here"
        case "loss":
            keywords["loss_is"] = "mena"
        case "micro batch":
            keywords["micro_batch"] = 0
        case "seed of a half":
            keywords["seed"] = 0.5
        case "tokens":
            keywords["tokens_per_sample"] = math.nan
        case "schedulers":
            keywords["scheduler"] = [StepLR(optimizer, 1)]
        case "another's scheduler":
            keywords["scheduler"] = StepLR(sgd(model), 1)
        case "wanting":
            keywords["scheduler"] = Wanting()
        case "clip below 0":
            keywords["clip_norm"] = -1.0
        case "clip NaN":
            keywords["clip_norm"] = float("nan")
        case "saved scaler":
            keywords["also_save"] = {"scaler": torch.amp.GradScaler("cpu")}
        case "scaler":
            keywords["grad_scaler"] = torch.amp.GradScaler("cpu")
    return model, optimizer, keywords


MISTAKES = {
    "list": ("takes one optimizer, not a list of 2", "groups"),
    "none": ("the optimizer is of type NoneType", "in this order"),
    "lbfgs": ("LBFGS computes the loss several times", "AdamW"),
    "another model's": ("holds none of the model's trained parameters", "after moving or wrapping"),
    "a stray parameter": (r"holds 1 trained parameter that the model does not have, .*\(3,\)", "nn.ModuleList"),
    "swapped": ("the model is of type SGD, not an nn.Module", "in this order"),
    "data parallel": ("wrapped in DataParallel", "the plain model"),
    "a wrong keyword": ("has no keyword 'by_train'", "before_update, clip_norm"),
    "epochs in words": ("epochs must be a whole number of at least 1, not '3'", "epochs=10, as an int"),
    "data": ("data must be 'sent' or 'local', not 'here'", "each guest has the data set itself"),
    "loss": ("loss_is must be 'mean' or 'sum', not 'mena'", "or their sum"),
    "micro batch": ("micro_batch must be a whole number of at least 1", "is measured"),
    "seed of a half": ("seed must be a whole number, not 0.5", "seed=0"),
    "tokens": ("tokens_per_sample must be a whole number of at least 0, not nan", "no tokens/s"),
    "schedulers": ("the scheduler is of type list, which has no step", "SequentialLR"),
    "another's scheduler": ("belongs to another optimizer", "that run.steps() gets"),
    "wanting": ("needs epoch", "yourself"),
    "clip below 0": (r"clip_norm must be a number above 0, not -1\.0", "nothing is clipped"),
    "clip NaN": ("clip_norm must be a number above 0, not nan", "nothing is clipped"),
    "saved scaler": ("a GradScaler is not needed", "bfloat16"),
    "scaler": ("takes no grad_scaler", "bf16 has the range of float32"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named_before_the_first_step(what: str) -> None:
    words, hint = MISTAKES[what]
    model, optimizer, keywords = given(what)
    with pytest.raises((LoopError, ConfigError), match=words) as caught:
        Run(launched()).steps(model, optimizer, SAMPLES, global_batch=4, **keywords)
    assert hint in caught.value.hint


def test_a_layer_that_is_unfrozen_during_the_training_is_named() -> None:
    """Its gradient would be the sum of all since then."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)

    def unfreeze(given: nn.Module) -> None:
        model[0].requires_grad_(True)

    with pytest.raises(LoopError, match=r"0\.weight was frozen when the training began"):
        trained(model, sgd(model), before_update=unfreeze)


def test_parameters_that_the_optimizer_gets_during_the_training_are_named() -> None:
    """Their gradient would be the sum of all since then."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model)

    def grow(given: nn.Module) -> None:
        model.more = nn.Linear(2, 3)
        optimizer.add_param_group({"params": list(model.more.parameters())})

    with pytest.raises(LoopError, match=r"given 2 more parameters after the training began, .*\(3, 2\)") as caught:
        trained(model, optimizer, before_update=grow)
    assert "before run.steps()" in caught.value.hint


def test_a_trained_layer_may_join_the_optimizer_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = sgd(model[0], lr=0.1)
    before = model[1].weight.detach().clone()

    def join(given: nn.Module) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[1].parameters())})

    trained(model, optimizer, before_update=join)
    assert not torch.equal(model[1].weight, before)


def test_a_guest_needs_no_optimizer() -> None:
    context = replace(launched(), role=GUEST)
    with pytest.raises(AssertionError):  # it gets as far as its link, which this one has not
        Run(context).steps(nn.Linear(2, 1), None, SAMPLES, global_batch=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scale", "words"), [(2.0**16, "the loss was scaled"), (8.0, r"scaler\.step\(\) was")])
def test_a_grad_scaler_in_the_loop_is_named(scale: float, words: str) -> None:
    model = nn.Linear(2, 1)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=scale)

    def train() -> None:
        for step in Run(launched()).steps(model, optimizer, SAMPLES, global_batch=4, micro_batch=4, steps=1):
            for batch in step:
                step.backward(scaler.scale(model(batch).square().mean()))
                scaler.step(optimizer)

    with pytest.raises(LoopError, match=words) as caught:
        train()
    assert "bf16" in caught.value.hint


def test_reduce_on_plateau_is_given_the_loss_of_each_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model, lr=0.001)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1, eps=0.0)
    seen: list[float] = []
    step = scheduler.step
    scheduler.step = lambda metrics, epoch=None: (seen.append(float(metrics)), step(metrics))[1]  # type: ignore[method-assign]
    losses = []
    for each in Run(launched()).steps(
        model, optimizer, SAMPLES, global_batch=8, micro_batch=4, steps=4, scheduler=scheduler
    ):
        for batch in each:
            each.backward(model(batch).square().mean())
        losses.append(each.loss)
    assert seen == losses
    assert len(seen) == 4


def test_its_state_is_saved_and_goes_on(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, ReduceLROnPlateau]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = sgd(model, lr=1e-9)  # so small that no loss is better than the first by a ten-thousandth
        return model, optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=2, eps=0.0)

    whole, optimizer, scheduler = make()
    expected = trained(whole, optimizer, scheduler=scheduler, steps=8, global_batch=8, micro_batch=8)
    assert expected[0] == 1e-9
    assert expected[-1] < 1e-9
    folder = new_folder(tmp_path, "x").path
    RunFolder(folder).write_manifest(sample.manifest())
    found = []
    for steps in (3, 8):
        model, optimizer, scheduler = make()
        context = launched(folder, resume=steps == 8)
        keywords = {"scheduler": scheduler, "steps": steps, "global_batch": 8, "micro_batch": 8}
        found += trained(model, optimizer, context, **keywords)
        context.log.close()
    assert found == expected


def test_other_schedulers_are_stepped_without_a_word() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model, lr=1.0)
    assert trained(model, optimizer, scheduler=LambdaLR(optimizer, lambda n: 0.5**n)) == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("left", ["zero before", "zero after", "model", "clip"])
def test_gradients_that_the_loop_changes_are_named(left: str) -> None:
    """They were summed over micro-batches: what is cleared or clipped between two of them is silently wrong."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model)

    def train() -> None:
        for step in Run(launched()).steps(model, optimizer, SAMPLES, global_batch=8, micro_batch=4, steps=1):
            for batch in step:
                if left == "zero before":
                    optimizer.zero_grad()
                step.backward(model(batch).square().mean())
                if left == "zero after":
                    optimizer.zero_grad(set_to_none=False)
                elif left == "model":
                    model.zero_grad()
                elif left == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with pytest.raises(LoopError, match="the gradients were changed in the loop") as caught:
        train()
    assert "clip_norm" in caught.value.hint


def test_a_scheduler_that_the_loop_steps_as_well_is_named() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    steps = Run(launched()).steps(
        model, optimizer, SAMPLES, global_batch=8, micro_batch=4, steps=3, scheduler=scheduler
    )

    def train() -> None:
        for step in steps:
            for batch in step:
                step.backward(model(batch).square().mean())
            scheduler.step()

    with pytest.raises(LoopError, match=r"scheduler\.step\(\) was called in the loop"):
        train()


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_scheduler_that_is_stepped_for_each_micro_batch_is_named(micro_batch: int) -> None:
    """The rate would depend on how many micro-batches this machine computes of a step."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model, lr=1.0)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)

    def train() -> None:
        for step in Run(launched()).steps(
            model, optimizer, SAMPLES, global_batch=8, micro_batch=micro_batch, steps=1
        ):
            for batch in step:
                step.backward(model(batch).square().mean())
                scheduler.step()

    with pytest.raises(LoopError, match="learning rate was changed inside") as caught:
        train()
    assert "after the inner loop" in caught.value.hint


@pytest.mark.parametrize("each", [False, True])
def test_a_rate_that_the_loop_sets_must_be_one_for_all_micro_batches_of_a_step(each: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model, lr=1.0)
    rates = []

    def train() -> None:
        batches = 0
        for step in Run(launched()).steps(model, optimizer, SAMPLES, global_batch=8, micro_batch=4, steps=3):
            for batch in step:
                batches += 1
                optimizer.param_groups[0]["lr"] = 1e-3 / (batches if each else step.index + 1)
                step.backward(model(batch).square().mean())
            rates.append(optimizer.param_groups[0]["lr"])

    if each:
        with pytest.raises(LoopError, match="learning rate was changed inside"):
            train()
    else:
        train()
        assert rates == [1e-3, 1e-3 / 2, 1e-3 / 3]


def test_a_scheduler_that_the_loop_steps_after_each_step_is_no_mistake() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model, lr=1.0)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    rates = []
    for step in Run(launched()).steps(model, optimizer, SAMPLES, global_batch=8, micro_batch=4, steps=3):
        for batch in step:
            step.backward(model(batch).square().mean())
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.125]


def test_a_scheduler_made_for_fewer_steps_is_named() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    with pytest.raises(LoopError, match="OneCycleLR") as caught:
        trained(model, optimizer, scheduler=OneCycleLR(optimizer, 0.1, total_steps=2), steps=4)
    assert "resumed run" in caught.value.hint


def test_a_run_alone_says_what_deserves_a_look(capsys: pytest.CaptureFixture[str]) -> None:
    import potluck

    model = nn.Linear(2, 1)
    seen = 0
    for step in potluck.start().steps(model, sgd(model), SAMPLES, global_batch=20, micro_batch=20, steps=2):
        for batch in step:
            seen += 1
            step.backward(model(batch).square().mean() * (float("nan") if seen == 1 else 1.0))
    said = capsys.readouterr()
    assert "potluck: a step of 20 samples is more than the data set has (8)" in said.err
    assert "potluck: step 1 was not applied" in said.err
    assert said.out == ""


def test_a_batch_that_is_larger_than_the_data_set_is_told(tmp_path: Path) -> None:
    folder = new_folder(tmp_path, "x").path
    model = nn.Linear(2, 1)
    context = launched(folder)
    assert len(trained(model, sgd(model), context, global_batch=20)) == 3
    context.log.close()
    (note,) = [e.text for e in read_events(folder) if isinstance(e, RunNote)]
    assert note.startswith("a step of 20 samples is more than the data set has (8)")


@pytest.mark.skipif(sys.platform == "win32", reason="a file is no folder, said otherwise there")
def test_a_folder_for_runs_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot make the folder .*notes/runs: .*notes is a file") as caught:
        new_folder(tmp_path / "notes" / "runs", "x")
    assert "disk is full" not in caught.value.hint


def test_one_that_cannot_be_made_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, *args: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(RunFolderError, match=r"there is no .*data, and making it failed: Perm") as caught:
        new_folder(tmp_path / "data" / "runs", "x")
    assert "that you may write there" in caught.value.hint
