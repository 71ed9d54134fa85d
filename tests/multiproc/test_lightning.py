"""Lightning's Trainer on Potluck: the plain Trainer's weights, alone and with a guest; what is refused."""

from __future__ import annotations

import dataclasses
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

import potluck
from potluck.errors import ConfigError, LoopError, PotluckError
from potluck.train.ending import GuestDone, Interrupted
from support.brief_guests import MOST_STEPS, brief_guests

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from potluck.integrations.lightning import PotluckStrategy
    from support import pl_job

JOB = Path(__file__).parents[1] / "support" / "pl_job.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "with_lightning.py"
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Imported for these tests only: it takes seconds, and every worker of pytest looks at this file."""
    global PotluckStrategy, pl, pl_job
    import lightning.pytorch as pl

    from potluck.integrations.lightning import PotluckStrategy
    from support import pl_job


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pl_job.fitted(tmp_path_factory.mktemp("plain"), strategy="auto")


def in_parts() -> Any:
    """The strategy in micro-batches of 3, so that what they weigh matters."""
    return PotluckStrategy(run=potluck.start(device="cpu", threads=1, micro_batch=3))


def assert_same(found: Any, expected: Any) -> None:
    for (name, ours), theirs in zip(
        found.lightning_module.named_parameters(), expected.lightning_module.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_figures(found: Any, expected: Any) -> None:
    """To the digits that do not depend on the order of a sum."""
    assert found.lightning_module.losses == pytest.approx(expected.lightning_module.losses, abs=2e-4)
    assert found.global_step == expected.global_step
    assert found.callback_metrics.keys() == expected.callback_metrics.keys()
    assert float(found.callback_metrics["val"]) == pytest.approx(float(expected.callback_metrics["val"]), abs=1e-4)


def test_alone_it_is_the_plain_trainer(plain: Any, tmp_path: Path) -> None:
    ours = pl_job.fitted(tmp_path, strategy=in_parts())
    assert_same(ours, plain)
    assert_same_figures(ours, plain)
    logged = [float(trainer.callback_metrics["train"]) for trainer in (ours, plain)]
    assert logged[0] == pytest.approx(logged[1], abs=1e-4), "a mean over the epoch's samples"


@pytest.mark.timeout(240)
def test_guests_that_come_and_go_change_nothing(tmp_path: Path) -> None:
    """Two at once. They join while the training runs, and leave while it runs on."""

    def stopped(strategy: Any, out: Path, enough: Callable[[int], bool]) -> Any:
        class Ends(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *ignored: Any) -> None:
                trainer.should_stop = enough(trainer.global_step)

        return pl_job.fitted(out, strategy=strategy, callbacks=[Ends()], max_steps=MOST_STEPS)

    with brief_guests(tmp_path / "fleet", JOB) as guests:
        ours = stopped(PotluckStrategy(run=guests.run), tmp_path, guests.after_step)
    plain = stopped("auto", tmp_path / "plain", lambda step: step == ours.global_step)
    guests.assert_came_and_went([8] * 5 + [4])
    assert_same(ours, plain)
    assert_same_figures(ours, plain)


def test_it_resumes_from_its_own_checkpoint_and_from_the_plain_one(tmp_path: Path) -> None:
    """At the end of an epoch: within one, only a loader with a state knows its place."""

    def trained(strategy: Any, out: Path, epochs: int, ckpt_path: Any = None) -> Any:
        saving = pl.callbacks.ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
        sequence = pl_job.loader(shuffle=False)
        return pl_job.fitted(
            out,
            batches=sequence,
            ckpt_path=ckpt_path,
            strategy=strategy,
            max_steps=-1,
            max_epochs=epochs,
            enable_checkpointing=True,
            callbacks=[saving],
        )

    whole = trained("auto", tmp_path / "plain", 3)
    trained(in_parts(), tmp_path / "ours", 3)
    for made_by in ("plain", "ours"):
        again = trained(in_parts(), tmp_path / "again", 3, tmp_path / made_by / "epoch=1.ckpt")
        assert_same(again, whole)
        assert again.global_step == whole.global_step
        assert len(again.lightning_module.losses) == 6, "it began after the second epoch"


def test_within_an_epoch_a_loader_with_a_state_resumes_at_the_next_sample(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def trained(strategy: Any, out: Path, ckpt_path: Any = None) -> Any:
        data = pl_job.loader().dataset
        saving = pl.callbacks.ModelCheckpoint(out, filename="{step}", save_top_k=-1, every_n_train_steps=4)
        return pl_job.fitted(
            out,
            batches=stateful.StatefulDataLoader(data, pl_job.BATCH, shuffle=True, generator=pl_job.seeded()),
            ckpt_path=ckpt_path,
            strategy=strategy,
            max_steps=10,
            enable_checkpointing=True,
            callbacks=[saving],
        )

    whole = trained("auto", tmp_path / "plain")
    trained(in_parts(), tmp_path / "ours")
    again = trained(in_parts(), tmp_path / "again", tmp_path / "ours" / "step=4.ckpt")
    plain = trained("auto", tmp_path / "again", tmp_path / "plain" / "step=4.ckpt")
    assert_same(again, plain)
    found, expected = again.lightning_module.losses, whole.lightning_module.losses
    assert found[:2] == pytest.approx(expected[4:6], abs=2e-4), "the rest of the epoch"
    assert len(found) == 6


def test_other_precisions_and_what_follows_a_training(tmp_path: Path) -> None:
    plain, ours = (
        pl_job.fitted(tmp_path, strategy=strategy, precision="bf16-mixed", max_steps=3)
        for strategy in ("auto", in_parts())
    )
    assert ours.lightning_module.losses == pytest.approx(plain.lightning_module.losses, rel=0.02)
    assert ours.validate(ours.lightning_module, pl_job.loader(shuffle=False), verbose=False)[0]["val"] > 0
    ours.fit_loop.max_epochs, ours.fit_loop.epoch_loop.max_steps = 2, 6
    ours.fit(ours.lightning_module, pl_job.loader())
    assert ours.global_step == 6


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    plain, ours = (
        pl_job.fitted(tmp_path, batches=pl_job.loader(40, batch=4), strategy=strategy, accumulate_grad_batches=2)
        for strategy in ("auto", in_parts())
    )
    assert_same(ours, plain)
    assert ours.global_step == plain.global_step == 50


def test_worker_processes_and_the_other_name_of_lightning(plain: Any, tmp_path: Path) -> None:
    ours = pl_job.fitted(tmp_path, batches=pl_job.loader(num_workers=1), strategy=in_parts())
    assert_same(ours, plain)
    if find_spec("pytorch_lightning") is not None:
        import pytorch_lightning

        made = pytorch_lightning.Trainer(
            strategy="potluck", accelerator="cpu", logger=False, default_root_dir=tmp_path
        )
        assert isinstance(made.strategy, pytorch_lightning.strategies.SingleDeviceStrategy)
        assert made.strategy.strategy_name == "potluck"


def test_means_over_items(tmp_path: Path) -> None:
    """A loss that is a mean over some of a batch's values: exact if training_step says over how many."""

    class Counts(pl_job.Net):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            points, wanted = batch
            counted = wanted > 4
            errors = (self.layers(points).squeeze(1) - wanted).square()[counted]
            return {"loss": errors.sum() / max(1, len(errors)), "items": len(errors)}

    found = []
    for strategy in ("auto", in_parts()):
        made = pl_job.trainer(tmp_path, strategy=strategy)
        made.fit(Counts(), pl_job.loader())
        found.append(made)
    assert_same(*reversed(found))


def test_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--epochs", "5", "--out", str(tmp_path)])
    made = runpy.run_path(str(EXAMPLE))
    assert made["trainer"].global_step == 90
    assert float(made["best"].best_model_score) > 0.6
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


class Guest:
    """A run on a guest that is given one step with one batch."""

    is_guest, device, stop_requested = True, torch.device("cpu"), False
    given: Any = None

    def steps(self, model: Any, optimizer: Any, loader: Any, *, global_batch: Any) -> Iterator[Any]:
        self.given = (optimizer, loader, global_batch)
        step = Step()
        yield step
        self.items = step.items
        raise GuestDone("the run is over")


class Step:
    index = 7

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield next(iter(pl_job.loader()))

    def backward(self, loss: Any, items: Any = None) -> None:
        self.items.append(items)


def test_on_a_guest_it_reports_saves_and_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 0)
    called: list[str] = []

    class Data(pl.LightningDataModule):
        def prepare_data(self) -> None:
            called.append("prepare_data")

        def setup(self, stage: str) -> None:
            called.append("setup of the data")

        def train_dataloader(self) -> Any:
            called.append("train_dataloader")

    class Tells(pl.Callback):
        def setup(self, *given: Any, **also: Any) -> None:
            called.append("callback")

        def on_exception(self, *given: Any) -> None:
            called.append("on_exception")

    class Net(pl_job.Net):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            called.append("setup")

        def configure_optimizers(self) -> Any:
            called.append("configure_optimizers")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            called.append(f"training_step {batch_idx} {self.global_step}")
            self.logger.experiment.add_scalar("a", 1)
            return super().training_step(batch, batch_idx)

    run = Guest()
    trainer = pl_job.trainer(
        tmp_path,
        strategy=PotluckStrategy(run=run),
        callbacks=[Tells()],
        logger=pl.loggers.CSVLogger(tmp_path / "logs"),
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    assert not trainer.is_global_zero
    with pytest.raises(GuestDone):
        trainer.fit(Net(), datamodule=Data(), ckpt_path=tmp_path / "which is not here.ckpt")
    assert called == ["setup", "training_step 7 7"]
    assert run.given == (None, None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interruption", [Interrupted, KeyboardInterrupt])
def test_ctrl_c_ends_it_after_the_step_and_its_callbacks_save(
    interruption: type[KeyboardInterrupt], tmp_path: Path
) -> None:
    run = potluck.start(device="cpu", threads=1)
    run._context = dataclasses.replace(run._context, interruption=interruption)

    class Asks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *ignored: Any) -> None:
            if trainer.global_step == 3:
                run._context.loop.request_stop()

    saving = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped:
        pl_job.fitted(
            tmp_path, strategy=PotluckStrategy(run=run), callbacks=[Asks(), saving], enable_checkpointing=True
        )
    assert stopped.type is interruption
    assert signal.getsignal(signal.SIGINT) is before
    saved = torch.load(next(tmp_path.glob("*.ckpt")), weights_only=False)
    assert saved["global_step"] == 3


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    class Spoils(pl_job.Net):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.global_step == 3 else loss

    seen = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *ignored: Any) -> None:
            seen.append(module.layers[0].weight.detach().clone())

    pl_job.trainer(tmp_path, callbacks=[Looks()], strategy=in_parts(), max_steps=6).fit(Spoils(), pl_job.loader())
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[3], seen[4])
    assert bool(seen[-1].isfinite().all())


# -- what is refused --------------------------------------------------------------------------------------------


def of(net: Any, **methods: Any) -> Any:
    return type("Changed", (net,), methods)()


def refused(out: Path, module: Any = None, batches: Any = None, **changed: Any) -> PotluckError:
    strategy = PotluckStrategy(run=potluck.start(device="cpu", threads=1))
    with pytest.raises((ConfigError, LoopError)) as error:
        pl_job.trainer(out, strategy=strategy, **changed).fit(module or pl_job.Net(), batches or pl_job.loader())
    return error.value


def test_several_devices_and_nodes_are_refused(tmp_path: Path) -> None:
    for given in ({"devices": 2}, {"num_nodes": 2}):
        error = refused(tmp_path, **given)
        assert "cannot be used with strategy" in error.what
        assert "joins as a guest" in (error.hint or "")


def test_another_device_than_potluck_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = potluck.start(device="cpu", threads=1)
    strategy = PotluckStrategy(run=run)
    monkeypatch.setattr(type(run), "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="a Trainer on cpu where Potluck computes on cuda"):
        pl_job.trainer(tmp_path, strategy=strategy).fit(pl_job.Net(), pl_job.loader())


def test_a_grad_scaler_is_refused(tmp_path: Path) -> None:
    scaled = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    error = refused(tmp_path, plugins=[scaled])
    assert "precision 16-mixed" in error.what
    assert "bf16-mixed" in (error.hint or "")


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    module = pl_job.Net()
    module.automatic_optimization = False
    assert "manual optimization" in refused(tmp_path, module, gradient_clip_val=None).what


def test_hooks_that_guests_would_miss_are_refused(tmp_path: Path) -> None:
    backward = of(pl_job.Net, backward=lambda self, loss: loss.backward())
    assert "the module's own backward()" in refused(tmp_path, backward).what
    transfer = of(pl_job.Net, on_before_batch_transfer=lambda self, batch, dataloader_idx: batch)
    assert "on_before_batch_transfer()" in refused(tmp_path, transfer).what


def test_several_optimizers_and_lbfgs_are_refused(tmp_path: Path) -> None:
    def two(self: Any) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.layers[0], self.layers[2])]

    with pytest.raises(RuntimeError, match="only supported with manual optimization"):  # Lightning's own words
        pl_job.trainer(tmp_path).fit(of(pl_job.Net, configure_optimizers=two), pl_job.loader())
    lbfgs = of(pl_job.Net, configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))
    assert "LBFGS computes the loss several times" in refused(tmp_path, lbfgs).what
    none = of(pl_job.Net, configure_optimizers=lambda self: None)
    assert "it would train nothing" in refused(tmp_path, none).what


def test_data_that_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    whole = list(pl_job.loader())
    assert "a Tensor of batches" in refused(tmp_path, batches=whole).what, "Lightning takes lists apart"
    assert "a map of batches" in refused(tmp_path, batches=map(list, whole)).what
    assert "DataLoader of batches" in refused(tmp_path, batches=DataLoader(whole, batch_size=None)).what  # type: ignore[arg-type]
    assert "training_step was given a dict" in refused(tmp_path, batches={"a": pl_job.loader()}).what


def test_a_step_without_a_loss_is_refused(tmp_path: Path) -> None:
    skips = of(pl_job.Net, training_step=lambda self, batch, batch_idx: None)
    assert "returned no loss" in refused(tmp_path, skips).what


def test_another_strategy_beside_it_is_lightnings_to_refuse(tmp_path: Path) -> None:
    """FSDP and DeepSpeed are strategies themselves: a Trainer takes one."""
    with pytest.raises(ValueError, match="invalid strategy name"):
        pl_job.trainer(tmp_path, strategy="potluck,fsdp")
