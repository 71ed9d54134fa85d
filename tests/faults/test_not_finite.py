"""Numbers that are none: a step whose gradient is not finite is not applied, is named, and spoils no checkpoint."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import potluck
from potluck.device import Device, pick
from potluck.errors import NonFiniteError
from potluck.fleet.ranks import free_port, rank_environment
from potluck.hub import inputs
from potluck.hub.members import SYNCING
from potluck.hub.parity import Reference, judge, sketch
from potluck.report.summary import read_events, summarize
from potluck.report.summary_text import summary_text
from potluck.spec.config import RunConfig
from potluck.spec.events import kind_of
from potluck.train.bad_steps import BadSteps, StepFacts
from potluck.train.beginning import Buffers
from potluck.train.checkpoint import CheckpointWriter, Snapshot, load_latest, save
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder
from potluck.train.launch import launched
from potluck.train.run import start
from potluck.train.update import Update, total_norm
from support.campaign import campaign
from support.processes import Processes
from support.protocol_world import World
from support.queueing import Queueing

NAN, INF = math.nan, math.inf
HUGE = 1e38
SAMPLES = [torch.full((2,), 0.1 * i) for i in range(1, 9)]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork (Linux)")

Poison = Callable[[int], float]
"""By the step's number, from 1: what its loss is multiplied with."""


def once(step: int, factor: float) -> Poison:
    return lambda number: factor if number == step else 1.0


def from_step(step: int, factor: float) -> Poison:
    return lambda number: factor if number >= step else 1.0


class Net(nn.Module):
    """Batch norm first: a batch with NaN in it spoils its running mean, whatever becomes of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.line = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))

    def forward(self, batch: Tensor) -> Tensor:
        return self.line(self.norm(batch))


class Trained:
    """A run alone, in this process, that keeps its folder."""

    def __init__(
        self,
        folder: Path,
        poison: Poison,
        *,
        steps: int = 8,
        every: int = 2,
        most: int = 3,
        device: Device | None = None,
        lr: float = 0.01,
        add: Poison = lambda step: 1.0,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **of_optimizer: Any,
    ) -> None:
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), lr=lr, **of_optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.weights: dict[int, Tensor] = {}
        folder.mkdir(exist_ok=True)
        self.folder = RunFolder(folder)
        log = EventLog(self.folder.events)
        config = RunConfig(checkpoint_every=every, max_bad_steps=most)
        context = RunContext(
            role=ALONE,
            config=config,
            device=device or pick("cpu"),
            name="here",
            log=log,
            folder=self.folder,
            again=lambda where: f"potluck host my.py --resume {where}",
        )
        with closing(log), launched(context):
            for step in potluck.start().steps(
                self.model,
                self.optimizer,
                SAMPLES,
                global_batch=4,
                steps=steps,
                micro_batch=4,
                scheduler=self.scheduler,
            ):
                factor = poison(step.index + 1)
                for batch in step:
                    output = self.model(batch * (factor if factor == INF or factor != factor else 1.0))
                    step.backward(output.square().mean() * factor + add(step.index + 1))
                self.weights[step.index + 1] = self.model.line.weight.detach().clone()

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.folder.path)


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if kind_of(event) == kind]


def saved(folder: Path) -> dict[int, bool]:
    """The checkpoints that are there: whether what is trained and the optimizer's state are finite."""
    found = {}
    for path in (folder / "checkpoints").glob("step-*"):
        tensors = {**load_file(path / "weights-000.safetensors"), **load_file(path / "optimizer-000.safetensors")}
        tensors.pop("mask", None)
        found[int(path.name[5:])] = all(bool(t.isfinite().all()) for t in tensors.values())
    return found


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint; all that are there must be finite."""
    found = saved(folder)
    assert all(found.values()), found
    return max(found, default=None)


# -- one step


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factor", [NAN, INF, HUGE])
def test_one_bad_step_changes_nothing_and_the_run_goes_on(
    tmp_path: Path, factor: float, fused: bool, queues: bool
) -> None:
    device = Queueing(0.002) if queues else None
    run = Trained(tmp_path, once(4, factor), device=device, fused=fused)
    (bad,) = of_kind(tmp_path, "step_not_applied")
    assert (bad.step, bad.machine, bad.in_a_row) == (4, "here", 1)
    assert "own gradient is not finite" in bad.reason
    steps = of_kind(tmp_path, "step")
    assert [e.applied for e in steps] == [n != 4 for n in range(1, 9)]
    assert torch.equal(run.weights[4], run.weights[3])
    assert not torch.equal(run.weights[5], run.weights[4])
    state = run.optimizer.state[run.model.line.weight]
    assert float(state["step"]) == 7, "its moments have not seen the step"
    assert run.scheduler.last_epoch == 8, "a schedule goes by steps"
    assert bool(run.model.norm.running_mean.isfinite().all()), "nor has the batch norm"
    assert int(run.model.norm.num_batches_tracked) == 7
    (end,) = of_kind(tmp_path, "run_end")
    assert (end.reason, end.not_applied) == ("finished", 1)
    assert math.isfinite(end.loss)
    assert newest(tmp_path) == 8


def test_the_steps_after_a_bad_one_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    """Both ways to leave an update out come to the same bits."""
    runs = [
        Trained(tmp_path / name, once(4, NAN), device=device, fused=True)
        for name, device in (("read", None), ("told", Queueing(0.002)))
    ]
    for name, tensor in runs[0].model.state_dict().items():
        assert torch.equal(tensor, runs[1].model.state_dict()[name]), name


class NoReading(TorchDispatchMode):
    """Inside, no value may be read from a tensor: on a GPU that would wait for all that it was given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_device_that_queues_is_not_waited_for_where_the_optimizer_can_be_told(kind: Any) -> None:
    model = Net()
    optimizer = kind(
        model.parameters(), lr=0.1, fused=True, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
    )
    update = Update(optimizer, queues=True)

    def computed(value: float) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        return total_norm([p.grad for p in model.parameters() if p.grad is not None]).isfinite()

    update.make(computed(1.0), Buffers(model))  # the first one is read: there is no state yet to leave alone
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finite, buffers = computed(NAN), Buffers(model)
    model.norm.running_mean.fill_(NAN)
    with NoReading():
        update.make(finite, buffers)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with NoReading():
        update.make(computed(1.0), Buffers(model))
    assert not torch.equal(model.line.weight, before["line.weight"])
    assert not hasattr(optimizer, "found_inf")


def test_a_fused_optimizers_first_update_is_never_left_half_made() -> None:
    """torch's fused SGD would keep a momentum that nobody has set."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, NAN)
    Update(optimizer, queues=True).make(torch.tensor(False), Buffers(model))
    assert not optimizer.state


def test_a_norm_of_half_numbers_may_be_larger_than_they_are() -> None:
    half = torch.full((100,), 60_000.0, dtype=torch.float16)
    assert float(total_norm([half])) == pytest.approx(600_000.0)
    assert not bool(total_norm([half, torch.tensor([INF])]).isfinite())


# -- many steps


@pytest.mark.parametrize("queues", [False, True])
def test_too_many_in_a_row_end_the_run_and_say_how_to_go_on(tmp_path: Path, queues: bool) -> None:
    device = Queueing(0.002) if queues else None
    with pytest.raises(NonFiniteError, match="here's own") as caught:
        Trained(tmp_path, from_step(4, NAN), steps=50, every=1, most=3, device=device)
    assert newest(tmp_path) in (1, 2, 3), "a good one, and none since"  # a slow disk puts one off
    assert f"of step {newest(tmp_path)}: potluck host my.py --resume {tmp_path}" in caught.value.hint
    assert (caught.value.code, caught.value.step, caught.value.exit_status) == ("not-finite", 6, 1)
    (end,) = of_kind(tmp_path, "run_end")
    assert (end.reason, end.loss) == ("failed", None)


def test_bad_steps_that_are_not_in_a_row_do_not_end_it(tmp_path: Path) -> None:
    Trained(tmp_path, lambda step: NAN if step % 2 else 1.0, steps=12, most=2)
    assert len(of_kind(tmp_path, "step_not_applied")) == 6


def test_the_last_steps_count_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        Trained(tmp_path, from_step(6, NAN), steps=8, most=3, device=Queueing(0.05), fused=True)


def test_none_ends_it_where_none_should(tmp_path: Path) -> None:
    run = Trained(tmp_path, from_step(4, NAN), steps=20, every=1, most=0)
    assert torch.equal(run.weights[20], run.weights[3])
    assert newest(tmp_path) == 20
    text = summary_text(summarize(run.events))
    assert "at first, – at last" in text
    assert "17 of the steps" in text


def test_a_loss_that_is_no_number_with_a_gradient_that_is_one_is_applied(tmp_path: Path) -> None:
    """As of a batch in which every label is ignored: torch's mean over nothing is NaN, its gradient zero."""
    run = Trained(tmp_path, once(3, 0.0), steps=4, most=1, add=once(3, NAN))
    assert [e.applied for e in of_kind(tmp_path, "step")] == [True] * 4
    assert [e.loss is None for e in of_kind(tmp_path, "step")] == [False, False, True, False]
    assert not torch.equal(run.weights[3], run.weights[2]), "the momentum goes on, as it would on one machine"


# -- weights that are not finite though every gradient was


@pytest.mark.parametrize("most", [3, 0])
def test_weights_that_overflow_are_never_saved(tmp_path: Path, most: int) -> None:
    """A learning rate far too large: the gradient of one step is finite, the weights after it are not."""
    with pytest.raises(NonFiniteError) as caught:
        Trained(tmp_path, once(1, 1e4), steps=20, every=1, most=most, lr=1e38, kind=torch.optim.SGD)
    assert "start it again, with a smaller learning rate" in caught.value.hint
    (end,) = of_kind(tmp_path, "run_end")
    assert end.reason == "failed"
    assert newest(tmp_path) is None


@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_a_checkpoint_that_is_not_finite_is_not_written_and_costs_none(tmp_path: Path, what: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        save(tmp_path, Snapshot(step=step, model=model, optimizer=optimizer))
    with torch.no_grad():
        spoilt = model.bias if what == "weights" else optimizer.state[model.bias]["exp_avg_sq"]
        spoilt[2] = INF
    writer = CheckpointWriter(tmp_path)
    assert writer.start(Snapshot(step=3, model=model, optimizer=optimizer))
    with pytest.raises(NonFiniteError, match=what) as caught:
        writer.wait()
    assert caught.value.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert load_latest(tmp_path).step == 2  # type: ignore[union-attr]


def test_what_is_made_of_infinities_may_stay_so(tmp_path: Path) -> None:
    model = Net()
    model.extra = nn.Parameter(torch.tensor([-INF, 1.0]))
    save(
        tmp_path, Snapshot(step=1, model=model, optimizer=torch.optim.SGD([model.extra], 0.1), finite={"line.bias"})
    )
    assert load_latest(tmp_path) is not None


# -- whose part it was


def cause(**facts: Any) -> tuple[object, object]:
    usual: dict[str, Any] = {"step": 3, "norm": NAN, "own_norm": None, "own_loss": 1.0, "machines": ["here"]}
    event = BadSteps("here", most=1).bad(StepFacts(**{**usual, **facts}))
    return event.machine, event.reason


def test_the_cause_is_named() -> None:
    assert cause() == ("here", "own gradient is not finite: its norm is nan")
    own = cause(own_norm=INF, own_loss=NAN, machines=["here", "ann"])
    assert own == ("here", "own gradient is not finite: its norm is inf, its loss is nan")
    several = cause(own_norm=1.0, norm=INF, machines=["here", "ann", "bob"])
    assert several == (None, "the sum of the gradients of here, ann, bob is too large for a number")
    assert cause(bad_ranks=[1], own_norm=1.0) == ("here", "own gradient is not finite, on rank 1")
    assert cause(bad_ranks=[0, 2]) == ("here", "own gradient is not finite, on rank 0 and rank 2")
    machine, reason = cause(bad_ranks=[0], own_norm=1.0, machines=["here", "ann"])
    assert (machine, reason) == (None, "the sum of the gradients of here, ann is too large for a number")


def test_a_micro_batch_of_one_sample_is_named_as_a_possible_cause() -> None:
    why = "own gradient is not finite: its norm is nan, its loss is nan"
    single = f"{why}; a micro-batch of one sample may have caused it"
    assert cause(own_loss=NAN, sizes=[2, 1]) == ("here", single)
    assert cause(own_loss=NAN, sizes=[1], machines=["here", "ann"]) == ("here", single)
    assert cause(own_loss=NAN, sizes=[1]) == ("here", why), "a step of one sample"
    assert cause(own_loss=NAN, sizes=[2, 3]) == ("here", why)


@pytest.mark.parametrize("batch", [4, 5, 1])
def test_a_loss_with_std_ends_the_run_with_a_hint_if_a_micro_batch_had_one_sample(batch: int) -> None:
    model = nn.Linear(2, 1)
    run = start(lambda event: None, RunConfig(device="cpu", threads=1, max_bad_steps=1, micro_batch=2))
    data = TensorDataset(torch.randn(20, 2))
    with contextlib.ExitStack() as failing:
        caught = failing.enter_context(pytest.raises(NonFiniteError)) if batch != 4 else None
        for step in run.steps(model, torch.optim.SGD(model.parameters(), 0.1), data, global_batch=batch, steps=2):
            for (x,) in step:
                y = model(x)
                step.backward(((y - y.mean()) / y.detach().std()).square().mean())
    if caught is not None:
        assert ("one sample" in str(caught.value.what)) == (batch == 5)
        assert ("std()" in (caught.value.hint or "")) == (batch == 5)


def test_a_guest_is_not_refused_for_what_the_host_itself_could_not_compute() -> None:
    """The common batch of the check was the bad one."""
    world = World(batch=6, samples=100)
    world.join("a")
    world.code()
    world.take_all("a")
    world.begin()
    world.take()
    world.compute()
    world.sketch("a")
    (action,) = world.comparing
    assert action.reference == "reference"
    spoilt = sketch([torch.full((4,), NAN)], [4], NAN)
    verdict = judge(Reference(first=spoilt), action.sketch, action.loss, random=action.random, names=())
    world.handle(inputs.SketchCompared(guest="a", check=action.check, verdict=verdict))
    member = world.members["a"]
    assert (member.state, member.reason) == (SYNCING, "the host's own gradient was not finite")


RANKS = """
import torch, potluck
run = potluck.start()
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in run.steps(model, optimizer, [torch.ones(2)] * 8, global_batch=4, steps=6, micro_batch=2):
    for batch in step:
        bad = step.index == 2 and not run.is_host
        step.backward(model(batch).square().mean() * (float("nan") if bad else 1.0))
"""


def test_all_ranks_of_a_host_leave_the_same_step_out(tmp_path: Path) -> None:
    job, config, port = tmp_path / "job.py", tmp_path / "run.toml", free_port()
    job.write_text(RANKS)
    config.write_text("[run]\ncheck_replica_every = 1\n")  # the ranks are compared after every step
    words = ["host", str(job), "--config", str(config), "--runs", str(tmp_path / "runs"), "--name", "host"]
    words += ["--bind", "127.0.0.1", "--device", "cpu", "--threads", "1"]
    with Processes(tmp_path / "logs") as processes:
        ranks = [
            processes.potluck(*words, name=f"rank-{rank}", env=rank_environment(rank, 2, "127.0.0.1", port))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.succeeds(deadline_s=50)
    (folder,) = (tmp_path / "runs").iterdir()
    assert [e.applied for e in of_kind(folder, "step")] == [True, True, False, True, True, True]
    (bad,) = of_kind(folder, "step_not_applied")
    assert (bad.machine, bad.reason) == ("host", "own gradient is not finite, on rank 1")
    assert newest(folder) == 6


# -- as a person sees it


SCRIPT = """
import torch, potluck
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = potluck.start()
for step in run.steps(model, optimizer, [torch.ones(2)] * 8, global_batch=4, steps=60, micro_batch=4):
    for batch in step:
        step.backward(model(batch).mean() * (float("nan") if step.index >= 9 else 1.0))
"""


def test_a_script_ends_with_a_status_its_reason_and_the_way_on(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.write_text(SCRIPT)
    words = ["--bind", "127.0.0.1", "--checkpoint-every", "3", "--max-bad-steps", "2", "--view", "plain"]
    with Processes(tmp_path / "logs") as processes:
        alone = processes.python(str(script), name="alone")
        host = processes.potluck("host", str(script), "--runs", str(tmp_path / "runs"), *words, name="host")
        assert alone.wait(50) == 1
        assert "NonFiniteError: 5 steps in a row were not applied" in alone.stderr()
        assert host.wait(50) == 1
        (folder,) = (tmp_path / "runs").iterdir()
        again = f"of step {newest(folder)}: potluck host '{script}' --resume {shlex.quote(str(folder))}"
        assert again in host.stderr().replace("\n", " ")
        assert "not-finite" in host.stderr()
        assert "loss –" in host.stdout()
        assert "step 11 was not applied (2 in a row): " in host.stdout()
        assert "failed after step 11" in host.stdout()
        report = processes.potluck("report", str(folder), name="report")
        assert "– at last" in report.succeeds(deadline_s=30)


@linux
def test_no_bad_number_reaches_a_checkpoint() -> None:
    assert campaign("r12_not_finite.py", "--times", "4", seed=4)["times"] == 4


def test_a_sparse_gradient_has_the_norm_of_a_dense_one() -> None:
    """A row that is used twice comes in two parts, which add up."""
    table = torch.zeros(5, 2, requires_grad=True)
    nn.functional.embedding(torch.tensor([1, 1, 2]), table, sparse=True).sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    assert total_norm([table.grad]) == total_norm([table.grad.to_dense()])
