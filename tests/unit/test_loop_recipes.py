"""The recipes of docs/guides/your-own-loop.md: each is run as it stands there, and beside it a plain loop.

Alone on the CPU: what guests change is tested elsewhere.
"""

from __future__ import annotations

import copy
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import potluck
from potluck.device import pick
from potluck.spec.config import RunConfig
from potluck.spec.events import Logged, RunEnded, RunNote
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog, events_in
from potluck.train.folder import RunFolder
from potluck.train.run import Run

pytestmark = pytest.mark.usefixtures("one_thread")

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "your-own-loop.md"
EPOCHS, SAMPLES, BATCH = 4, 64, 16


def recipe(title: str) -> str:
    """The code below this heading."""
    (code,) = re.findall(rf"^### {re.escape(title)}\n.*?```python\n(.*?)```", GUIDE.read_text("utf-8"), re.M | re.S)
    return str(code)


class Bits:
    """A training in the making: what a recipe finds when it begins."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        numbers = torch.Generator().manual_seed(1)
        points = torch.randn(SAMPLES, 6, generator=numbers)
        labels = (points @ torch.randn(6, 3, generator=numbers)).argmax(1)
        self.dataset = list(zip(points, labels))
        self.validation = DataLoader(self.dataset[: SAMPLES // 4], batch_size=8)
        self.loader = DataLoader(self.dataset, batch_size=BATCH)
        torch.manual_seed(2)
        self.critic: Any = None
        self.second: Any = None
        self.model: Any = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        self.folder, self.resume = folder, resume
        self.use(torch.optim.SGD, lr=0.1, momentum=0.9)

    def use(self, kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
        self.optimizer = kind(self.model.parameters(), **settings)

    def run(self, micro_batch: int | None = BATCH) -> Run:
        self.folder.mkdir(exist_ok=True)
        folder = RunFolder(self.folder)
        context = RunContext(
            role=ALONE,
            config=RunConfig(checkpoint_every=0, micro_batch=micro_batch),
            device=pick("cpu", threads=1),
            name="here",
            log=EventLog(folder.events),
            folder=folder,
            resume=self.resume,
        )
        return Run(context)

    def follow(
        self, title: str, *, code: str | None = None, micro_batch: int | None = BATCH, **given: Any
    ) -> dict[str, Any]:
        """Run the recipe, which finds what is `given`, too; the names that it leaves."""
        names = {name: getattr(self, name) for name in ("model", "optimizer", "loader", "dataset", "validation")}
        names |= {"run": self.run(micro_batch), "torch": torch, "F": F, "math": math, "safetensors": safetensors}
        names |= {"DataLoader": DataLoader, **given}
        exec(compile(code or recipe(title), f"{GUIDE.name}: {title}", "exec"), names)
        self.loader = names["loader"]
        return names

    def batches(self, epochs: int = EPOCHS) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For the plain loop: the epoch's number and a batch."""
        for epoch in range(epochs):
            for x, y in self.loader:
                yield epoch, x, y

    def update(self, x: Tensor, y: Tensor) -> float:
        """A plain step."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.fixture
def here(tmp_path: Path) -> Bits:
    return Bits(tmp_path / "run")


@pytest.fixture
def plain(tmp_path: Path) -> Bits:
    return Bits(tmp_path / "plain")


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("worse_after", [2, 0])
def test_validation_best_weights_early_stop(
    here: Bits, plain: Bits, worse_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate that is far too large from some epoch on, validation gets worse and the loop is left."""
    monkeypatch.chdir(tmp_path)
    for each in (here, plain):
        each.model.append(nn.BatchNorm1d(3))
        each.use(torch.optim.SGD, lr=0.1)
    left = worse_after + 3
    code = recipe("Validation, the best weights, early stopping")
    worse = f"loss = loss if step.epoch < {worse_after or 99} else 1e9 + step.epoch\n        model.train()"
    names = here.follow("Validation", code=code.replace("model.train()", worse, 1).replace("epochs=50", "epochs=7"))
    names["run"].close()  # a loop that was left ends in a moment
    seen = events_in(here.folder / "events.jsonl")
    values = [event.values["validation"] for event in seen if isinstance(event, Logged)]
    (end,) = [event for event in seen if isinstance(event, RunEnded)]
    epochs = left if worse_after else 7
    assert (len(values), end.reason, end.step) == (epochs, "finished", epochs * len(plain.loader))
    best, expected = math.inf, []
    kept: dict[str, Tensor] = {}
    for number, (epoch, x, y) in enumerate(plain.batches(epochs)):
        plain.update(x, y)
        if number % len(plain.loader) == len(plain.loader) - 1:
            plain.model.eval()
            with torch.no_grad():
                loss = sum(F.cross_entropy(plain.model(x), y).item() for x, y in plain.validation)
            plain.model.train()
            expected.append(loss if epoch < (worse_after or 99) else 1e9 + epoch)
            if expected[-1] < best:
                best, kept = expected[-1], copy.deepcopy(plain.model.state_dict())
    assert values == pytest.approx(expected, rel=1e-5)
    assert_same(here.model, plain.model)
    saved = safetensors.torch.load_file("best.safetensors")
    assert all(torch.allclose(saved[name], tensor, atol=1e-6) for name, tensor in kept.items())


@pytest.mark.parametrize("each", ["step", "epoch"])
def test_schedulers(here: Bits, plain: Bits, each: str) -> None:
    here.follow(f"A scheduler for each {each}")
    schedulers = torch.optim.lr_scheduler
    scheduler: Any
    if each == "step":
        per_epoch = len(plain.loader)
        scheduler = schedulers.OneCycleLR(plain.optimizer, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=per_epoch)
    else:
        scheduler = schedulers.StepLR(plain.optimizer, step_size=2, gamma=0.1)
    for number, (_, x, y) in enumerate(plain.batches(), 1):
        plain.update(x, y)
        if each == "step" or number % len(plain.loader) == 0:
            scheduler.step()
    assert_same(here.model, plain.model)
    assert here.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"] != 0.1


def test_reduce_on_plateau_over_a_loss_of_ones_own(here: Bits) -> None:
    code = recipe("A scheduler for each epoch")
    code = code.replace("StepLR(optimizer, step_size=2, gamma=0.1)", "ReduceLROnPlateau(optimizer, patience=0)")
    here.follow("plateau", code=code.replace("scheduler.step()", "scheduler.step(float(step.epoch))"))
    assert here.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3), "worse in three of four epochs"


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_summed_loss_has_the_updates_of_the_mean(here: Bits, plain: Bits, clip: float | None) -> None:
    """The plain loop's gradient is a sum: a smaller rate, more weight decay, clipping to a larger norm."""
    plain.use(torch.optim.SGD, lr=0.1 / BATCH, momentum=0.9, weight_decay=0.01 * BATCH)
    here.use(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    run = here.run(4)
    for step in run.steps(here.model, here.optimizer, here.loader, epochs=EPOCHS, clip_norm=clip, loss_is="sum"):
        for x, y in step:
            step.backward(F.cross_entropy(here.model(x), y, reduction="sum"))
    clipped = 0
    for _, x, y in plain.batches():
        plain.optimizer.zero_grad()
        F.cross_entropy(plain.model(x), y, reduction="sum").backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(plain.model.parameters(), clip * BATCH)
            clipped += int(norm > clip * BATCH)
        plain.optimizer.step()
    if clip is None:
        assert_same(here.model, plain.model)
        return
    assert clipped
    for ours, theirs in zip(here.model.parameters(), plain.model.parameters()):
        # torch adds 1e-6 to the norm that it clips: 3e-6 of 0.3, and less of 16 times that
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-6)


def test_a_get_batch_of_ones_own(here: Bits, plain: Bits) -> None:
    """Beside it a plain loop that draws the same positions and sets the rate by hand."""
    tokens = torch.randint(32, (500,), generator=torch.Generator().manual_seed(5))
    steps, block = 8, 6

    def get_lr(number: int) -> float:
        return 0.2 * min((number + 1) / 3, 1 - number / 10)

    for each in (here, plain):
        torch.manual_seed(4)
        each.model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
        each.use(torch.optim.SGD, lr=0.2, momentum=0.9)
    names: dict[str, Any] = {
        "tokens": tokens,
        "STEPS": steps,
        "BATCH": BATCH,
        "BLOCK": block,
        "LR": 0.2,
        "get_lr": get_lr,
    }
    here.follow("A get_batch() of your own", micro_batch=4, **names)
    for number in range(steps):
        places = []
        for index in range(number * BATCH, (number + 1) * BATCH):
            drawn = torch.Generator().manual_seed(index)
            places.append(int(torch.randint(len(tokens) - block, (1,), generator=drawn)))
        x = torch.stack([tokens[i : i + block] for i in places])
        y = torch.stack([tokens[i + 1 : i + 1 + block] for i in places])
        for group in plain.optimizer.param_groups:
            group["lr"] = get_lr(number)
        plain.optimizer.zero_grad()
        F.cross_entropy(plain.model(x).flatten(0, 1), y.flatten()).backward()
        plain.optimizer.step()
    assert_same(here.model, plain.model)


@pytest.mark.parametrize("stopped", [False, True])
def test_an_average_of_the_weights(here: Bits, plain: Bits, *, stopped: bool) -> None:
    title = "An average of the weights (EMA)"
    if stopped:
        here.follow(title, code=recipe(title).replace("epochs=4", "epochs=2"))
        here = Bits(here.folder, resume=True)
    found = here.follow(title)["average"]
    swa = torch.optim.swa_utils
    expected = swa.AveragedModel(plain.model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    for _, x, y in plain.batches():
        plain.update(x, y)
        expected.update_parameters(plain.model)
    assert_same(here.model, plain.model)
    assert_same(found, expected)


def test_gradient_accumulation(here: Bits, plain: Bits) -> None:
    here.follow("Gradient accumulation", micro_batch=None)
    plain.loader = DataLoader(plain.dataset, batch_size=8)
    for number, (_, x, y) in enumerate(plain.batches(), 1):
        (F.cross_entropy(plain.model(x), y) / 4).backward()
        if number % 4 == 0:
            plain.optimizer.step()
            plain.optimizer.zero_grad()
    assert_same(here.model, plain.model)


def test_bf16_autocast(here: Bits, plain: Bits) -> None:
    here.follow("bf16 autocast")
    for _, x, y in plain.batches():
        plain.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(plain.model(x), y)
        loss.backward()
        plain.optimizer.step()
    for ours, theirs in zip(here.model.parameters(), plain.model.parameters()):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm(), "bf16 rounds the loss, not the weights"


def test_torch_compile(here: Bits, plain: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the backend that needs no compiler."""
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    here.follow("torch.compile")
    assert here.model._compiled_call_impl is not None
    for _, x, y in plain.batches():
        plain.update(x, y)
    assert_same(here.model, plain.model)


class Words(nn.Module):
    """With a body to freeze, a head to tie, and a part that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 5)
        self.body = nn.Linear(6, 5)
        self.bias = nn.Parameter(torch.zeros(5))
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.embedding(x[:, 0].gt(0).long())
        return self.head(torch.tanh(self.body(x) + self.bias) + first)


def test_frozen_unused_and_tied_parameters_in_groups(here: Bits, plain: Bits) -> None:
    for each in (here, plain):
        torch.manual_seed(4)
        each.model = Words()
        each.use(torch.optim.SGD, lr=0.0)
    before = copy.deepcopy(plain.model.state_dict())
    title = "Frozen, unused and tied parameters, several groups"
    names = here.follow(title)
    made = {name: getattr(plain, name) for name in ("model", "optimizer", "loader")} | {"torch": torch}
    exec(recipe(title).split("for step in")[0], made)
    plain.optimizer = made["optimizer"]
    for _, x, y in plain.batches():
        plain.update(x, y)
    assert_same(here.model, plain.model)
    assert here.model.head.weight is here.model.embedding.weight
    assert torch.equal(here.model.body.weight, before["body.weight"])
    assert torch.equal(here.model.unused.weight, before["unused.weight"])
    assert not torch.equal(here.model.embedding.weight, before["embedding.weight"])
    assert [group["lr"] for group in names["optimizer"].param_groups] == [0.001, 0.01]


@pytest.mark.parametrize("at_once", [BATCH, 4])
def test_a_loss_that_compares_samples_sees_one_micro_batch(here: Bits, plain: Bits, at_once: int) -> None:
    """With the batch size as `micro_batch=` it is the plain loop's."""

    def contrastive(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x) @ model(x + 0.1).T, torch.arange(len(x)))

    for step in here.run(None).steps(here.model, here.optimizer, here.loader, epochs=EPOCHS, micro_batch=at_once):
        for x, _ in step:
            step.backward(contrastive(here.model, x))
    for _, x, _ in plain.batches():
        plain.optimizer.zero_grad()
        torch.stack([contrastive(plain.model, part) for part in x.split(at_once)]).mean().backward()
        plain.optimizer.step()
    assert_same(here.model, plain.model)


@pytest.mark.parametrize("at_once", [16, 8, 2])
def test_running_statistics_are_those_of_a_loop_with_the_same_micro_batches(
    here: Bits, plain: Bits, at_once: int
) -> None:
    """Of the whole batch at once: those of a plain loop. Otherwise of one that accumulates."""
    for each in (here, plain):
        each.model.insert(1, nn.BatchNorm1d(12))
        each.use(torch.optim.SGD, lr=0.1)
    for step in here.run(at_once).steps(here.model, here.optimizer, here.loader, epochs=EPOCHS):
        for x, y in step:
            step.backward(F.cross_entropy(here.model(x), y))
    for _, x, y in plain.batches():
        plain.optimizer.zero_grad()
        for part, labels in zip(x.split(at_once), y.split(at_once)):
            (F.cross_entropy(plain.model(part), labels) * len(part) / len(x)).backward()
        plain.optimizer.step()
    assert_same(here.model, plain.model)
    assert int(here.model[1].num_batches_tracked) == EPOCHS * SAMPLES // at_once


def test_a_step_that_is_not_applied_leaves_no_trace_in_them(here: Bits) -> None:
    here.model.insert(1, nn.BatchNorm1d(12))
    here.use(torch.optim.SGD, lr=0.1)
    counts = []
    for step in here.run().steps(here.model, here.optimizer, here.loader, epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(here.model(x), y) * (math.nan if step.index == 1 else 1.0))
        counts.append(int(here.model[1].num_batches_tracked))
    assert counts == [1, 1, 2, 3]


def test_what_fabrics_loop_becomes(here: Bits, plain: Bits) -> None:
    """The code below the heading Fabric in docs/guides/trainers.md."""
    (code,) = re.findall(
        r"^## Fabric\n.*?```python\n(.*?)```", (GUIDE.parent / "trainers.md").read_text("utf-8"), re.M | re.S
    )
    start = functools.partial(potluck.start, device="cpu", threads=1, micro_batch=BATCH)
    names = {"potluck": SimpleNamespace(start=start), "build": lambda: here.model, "loader": here.loader}
    exec(code, names | {"torch": torch, "F": F})
    plain.use(torch.optim.AdamW, lr=3e-4)
    for _, x, y in plain.batches(10):
        plain.optimizer.zero_grad()
        F.cross_entropy(plain.model(x), y).backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.optimizer.step()
    assert_same(here.model, plain.model)


def test_a_gan_alone_has_two_loops_in_zip(here: Bits, plain: Bits) -> None:
    """The generator's backward leaves gradients in the other model, too."""

    def of_critic(bits: Bits, x: Tensor) -> Tensor:
        made = bits.critic(bits.model(x).detach())
        return F.softplus(-bits.critic(x[:, :3])).mean() + F.softplus(made).mean()

    def of_model(bits: Bits, x: Tensor) -> Tensor:
        return F.softplus(-bits.critic(bits.model(x))).mean()

    for each in (here, plain):
        torch.manual_seed(6)
        each.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        each.second = torch.optim.Adam(each.critic.parameters(), lr=0.01)
    run = potluck.start(device="cpu", threads=1, micro_batch=4)
    critics = run.steps(here.critic, here.second, here.loader, epochs=EPOCHS)
    for first, then in zip(critics, run.steps(here.model, here.optimizer, here.loader, epochs=EPOCHS)):
        for x, _ in first:
            first.backward(of_critic(here, x))
        for x, _ in then:
            then.backward(of_model(here, x))
    for _, x, _ in plain.batches():
        for optimizer, loss in ((plain.second, of_critic), (plain.optimizer, of_model)):
            optimizer.zero_grad()
            loss(plain, x).backward()
            optimizer.step()
    assert_same(here.critic, plain.critic)
    assert_same(here.model, plain.model)


@pytest.mark.parametrize("where", ["after validating", "before each step", "in each batch", "never"])
def test_a_model_that_was_left_in_evaluation_mode_is_told_once(here: Bits, where: str) -> None:
    run = here.run()
    for step in run.steps(here.model, here.optimizer, here.loader, epochs=2):
        if where == "before each step":
            here.model.train()
        for x, y in step:
            if where == "in each batch":
                here.model.train()
            step.backward(F.cross_entropy(here.model(x), y))
        if step.index in (1, 5):
            here.model.eval()
            if where == "after validating":
                here.model.train()
    notes = [e.text for e in events_in(here.folder / "events.jsonl") if isinstance(e, RunNote)]
    told = [text for text in notes if "evaluation mode" in text]
    assert len(told) == (where == "never")
    assert all(text.startswith("step 3 was computed") for text in told)


def test_the_epoch_loop_that_people_write_changes_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both loops of the guide as they stand there: the same weights, the same best ones."""
    title = "From epochs, validation and best weights"
    _, section = GUIDE.read_text("utf-8").split(f"### {title}\n")
    before, after = re.findall(r"```python\n(.*?)```", section.split("\n### ")[0], re.S)
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    new = sum(line[0] == "+" for line in changed) + 1  # and the line that makes `run`
    assert max(new, sum(line[0] == "-" for line in changed)) <= 10
    kept, models = [], []
    for name, code in (("plain", before), ("ours", after)):
        bits = Bits(tmp_path / name)
        monkeypatch.chdir(bits.folder if bits.folder.exists() else tmp_path)
        names = bits.follow(title, code=code)
        names["run"].close()
        kept.append((names["best"], safetensors.torch.load_file("best.safetensors")))
        models.append(bits.model)
    assert kept[0][0] == pytest.approx(kept[1][0], rel=1e-5)
    assert all(torch.allclose(kept[0][1][name], tensor, atol=1e-6) for name, tensor in kept[1][1].items())
    assert_same(models[1], models[0])
