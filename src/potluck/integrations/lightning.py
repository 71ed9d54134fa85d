"""Lightning's Trainer on Potluck: it trains as usual, and guests compute parts of each step.

    import potluck.integrations.lightning               # makes the name known
    trainer = Trainer(strategy="potluck")               # or strategy=PotluckStrategy(run=…)

Owns the strategy. The Trainer's loader reads the samples of a step, Potluck distributes them, and the Trainer
clips, updates, schedules, logs, validates and saves.
"""

from __future__ import annotations

import copy
import math
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from potluck.errors import ConfigError, LoopError, MissingModuleError
from potluck.hosting import start
from potluck.train.ending import Interrupted
from potluck.train.given import NO_SCALER, ONE_OPTIMIZER
from potluck.train.pushed import PushedLoader, Samples
from potluck.train.run import Run
from potluck.train.step import Step

NAME = "potluck"
TREES = ("lightning.pytorch", "pytorch_lightning")
"""Lightning is published as two packages with different classes; a script uses one of them."""
ONE_DEVICE = "use devices=1, num_nodes=1: every other device or machine joins as a guest, with its own process"
ONE_LOADER = "give one torch DataLoader that makes batches of single samples: Potluck shares them out"

_Base: Any = object


class _Shared(_Base):  # type: ignore[misc]
    """The strategy without its base class, which is Lightning's SingleDeviceStrategy."""

    strategy_name = NAME
    tree = ""

    def __init__(self, run: Run | None = None, **keywords: Any) -> None:
        """`run` is the result of `potluck.start(host=True)`, if the script hosts by itself."""
        self._run = start() if run is None else run
        super().__init__(device=self._run.device, **keywords)
        self._steps: Any = None
        self._pushed: Any = None
        self._collate: Any = None
        self._coming: list[Samples] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None
        self._handler: Any = signal.SIG_DFL
        if self._run.is_guest:
            self.global_rank = self.local_rank = 1  # Lightning then prepares no data, and says nothing twice
            import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = 1

    @property
    def is_global_zero(self) -> bool:
        """False on guests: a script can ask `trainer.is_global_zero`."""
        return not self._run.is_guest

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A guest reads no checkpoint: its `setup` does not return."""
        return self._run.is_guest

    def setup_environment(self) -> None:
        super().setup_environment()
        module, trainer = self.lightning_module, self.lightning_module.trainer
        refuse(trainer, self._run.device, import_module(f"{self.tree}.utilities.model_helpers").is_overridden)
        if self._run.is_guest:
            trainer.callbacks = []
            silent = import_module(f"{self.tree}.loggers.logger").DummyLogger()
            trainer.loggers = [silent for _ in trainer.loggers]
            module.log = module.log_dict = _nothing
            if trainer.datamodule is not None:
                trainer.datamodule.setup = _nothing

    def setup(self, trainer: Any) -> None:
        if self._run.is_guest and trainer.state.fn == "fit":
            self._help(trainer)
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """For training: the same loader, which then returns single samples."""
        if not self.lightning_module.trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader) or dataloader.batch_sampler is None:
            raise ConfigError(f"the training data is a {type(dataloader).__name__} of batches", hint=ONE_LOADER)
        loader = copy.copy(dataloader)
        self._collate, loader.collate_fn = loader.collate_fn, Samples
        return loader

    def batch_to_device(self, batch: Any, *given: Any, **keywords: Any) -> Any:
        return batch if isinstance(batch, Samples) else super().batch_to_device(batch, *given, **keywords)

    def on_train_batch_start(self, *given: Any) -> None:
        if self._run.stop_requested and not self._coming:
            raise Interrupted

    def training_step(self, *given: Any, **keywords: Any) -> Any:
        """Run the whole step with its last batch. Its gradients are put aside, because Lightning clears them after
        this."""
        part, *rest = given
        trainer = self.lightning_module.trainer
        if not isinstance(part, Samples):
            raise ConfigError(f"training_step was given a {type(part).__name__} of batches", hint=ONE_LOADER)
        self._coming.append(part)
        if trainer.fit_loop._should_accumulate():
            return torch.zeros((), device=self.root_device, requires_grad=True)
        samples, self._coming = [sample for each in self._coming for sample in each.unpacked()], []
        if self._steps is None:
            self._begin(trainer, len(samples))
        self._pushed.push(samples)
        step, output = next(self._steps), None
        for batch in step:
            output = self._compute(step, batch, *rest)
        trainer._results.batch_size = len(samples)
        self._gradients = [(p, p.grad) for p in self.lightning_module.parameters() if p.requires_grad]
        for parameter, _ in self._gradients:
            parameter.grad = None
        loss = torch.tensor(step.loss, device=self.root_device, requires_grad=True)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *given: Any, **keywords: Any) -> Tensor:
        """The gradients of the whole step, which were computed with the loss."""
        module, gradients, self._gradients = self.lightning_module, self._gradients, None
        if gradients is not None:  # else a batch that waits for the last one of its step
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *given: Any, **keywords: Any) -> Any:
        """The closure comes first: torch tells Potluck of an update before it calls the closure."""
        loss = closure()
        return super().optimizer_step(optimizer, lambda: loss, *given, **keywords)

    def _compute(self, step: Step, batch: Any, *rest: Any) -> Any:
        """One micro-batch."""
        batch = super().batch_to_device(self.precision_plugin.convert_input(batch))
        if not self._run.is_guest:
            results = self.lightning_module.trainer._results
            results.batch, results.batch_size = batch, None
        output = super().training_step(batch, *rest)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise LoopError(
                "training_step returned no loss for a micro-batch: every sample of a step counts",
                hint='return {"loss": loss, "items": 0} where nothing in it should count',
            )
        step.backward(loss, items=output.get("items") if isinstance(output, Mapping) else None)
        return output

    def _begin(self, trainer: Any, samples: int) -> None:
        """Open the run's steps: model and optimizer are as the Trainer has prepared them."""
        total, done = trainer.estimated_stepping_batches, trainer.global_step
        steps, batch = int(total) if 0 <= total < math.inf else None, max(samples, _step_of(trainer) or 0)
        self._pushed = PushedLoader(self._collate, global_batch=batch, first_step=done, steps=steps)
        self._handler = signal.getsignal(signal.SIGINT)
        self._steps = self._run.steps(self.lightning_module, self.optimizers[0], self._pushed)

    def _help(self, trainer: Any) -> None:
        """Compute leases until the run is over, which ends the script."""
        module, loop = self.lightning_module, trainer.fit_loop.epoch_loop
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        counted = loop.automatic_optimization.optim_progress.optimizer.step.total
        metrics = [each for each in module.modules() if isinstance(each, import_module("torchmetrics").Metric)]
        steps: Any = self._run.steps
        for step in steps(module, None, None, global_batch=_step_of(trainer)):
            counted.completed = step.index  # self.global_step
            _, *rest = loop._build_kwargs(OrderedDict(), None, step.index).values()
            for batch in step:
                self._compute(step, batch, *rest)
            for metric in metrics:  # nobody reads them here, and some keep all they saw
                metric.reset()

    def teardown(self) -> None:
        if self._steps is not None:
            self._steps = None
            self._run.close()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Lightning would end an interrupted script here, with its own exit status. Potluck ends it later."""
        if self._run.is_guest:
            raise exception
        self._steps = None
        self._run.close(exception)
        if isinstance(exception, Interrupted):
            trainer = self.lightning_module.trainer
            for logger in trainer.loggers:
                logger.finalize("failed")
            trainer._teardown()
            signal.signal(signal.SIGINT, self._handler)
            raise self._run._context.interruption from None


def refuse(trainer: Any, own: torch.device, overridden: Callable[[str, Any], bool]) -> None:
    """Refuse other ways to use several devices, and features that a step on several machines cannot have."""
    module, given = trainer.lightning_module, trainer._accelerator_connector
    hooks = [each for each in (module, trainer.datamodule) if each is not None]
    nodes, count, device = given._num_nodes_flag, len(given._parallel_devices), given._parallel_devices[0]
    elsewhere = (device.type, device.index or 0) != (own.type, own.index or 0)
    before = any(overridden("on_before_batch_transfer", each) for each in hooks)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    same = 'give both the same: Trainer(accelerator="cpu") and --device cpu, or neither'
    refused = (
        (count > 1 or nodes > 1, f"{count} devices on {nodes} nodes", ONE_DEVICE),
        (elsewhere, f"a Trainer on {device} where Potluck computes on {own}", same),
        (scaler is not None, "precision 16-mixed", f'say "bf16-mixed". {NO_SCALER}'),
        (not module.automatic_optimization, "manual optimization", f"{ONE_OPTIMIZER}, or run.steps()"),
        (overridden("backward", module), "the module's own backward()", "return the loss from training_step()"),
        (before, "on_before_batch_transfer()", "do it in the collate function or in on_after_batch_transfer()"),
    )
    for found, what, instead in refused:
        if found:
            raise ConfigError(f'{what} cannot be used with strategy="{NAME}"', hint=instead)


def _step_of(trainer: Any) -> int | None:
    """Samples in a step, if the loader says."""
    size = getattr(trainer.fit_loop._data_source.instance, "batch_size", None)
    return size * trainer.accumulate_grad_batches if isinstance(size, int) else None


def _nothing(*given: Any, **keywords: Any) -> None:
    """Replaces methods that only the host needs."""


def _registered(tree: str) -> type[Any]:
    strategies = import_module(f"{tree}.strategies")
    made = type("PotluckStrategy", (_Shared, strategies.SingleDeviceStrategy), {"tree": tree})
    strategies.StrategyRegistry.register(NAME, made, description="all machines of a run", override=True)
    return made


_made = [_registered(tree) for tree in TREES if find_spec(tree.partition(".")[0]) is not None]
if not _made:
    raise MissingModuleError("Lightning is not installed", hint="pip install -e '.[lightning]'")
PotluckStrategy = _made[0]
