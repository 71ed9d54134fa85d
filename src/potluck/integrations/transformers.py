"""The Hugging Face Trainer on Potluck: the Trainer trains as usual, and guests compute parts of each step.

    from potluck.integrations.transformers import Trainer       # instead of transformers' own
    SFTTrainer = potluck_trainer(trl.SFTTrainer)                # any other subclass of it

Owns which of the Trainer's methods are replaced. Its loader reads the samples of a step, Potluck distributes them,
and the Trainer clips, updates, schedules, logs, evaluates and saves.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from potluck.errors import ConfigError, LoopError, MissingModuleError
from potluck.hosting import start
from potluck.train.data import makes_data, opened
from potluck.train.pushed import PushedLoader, Samples
from potluck.train.run import Run
from potluck.train.step import Step

try:
    from accelerate.utils import find_batch_size
    from transformers import Trainer as PlainTrainer
    from transformers import TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as missing:
    raise MissingModuleError(
        f"the Hugging Face Trainer cannot be imported: {missing}", hint="pip install -e '.[transformers]'"
    ) from missing

ONE_PROCESS = "start it with potluck host, one process per machine; each machine that helps joins as a guest"


class Trainer(PlainTrainer):  # type: ignore[misc]
    """The Trainer whose steps are computed by all machines of a run.

    A step has `per_device_train_batch_size` × `gradient_accumulation_steps` samples, over all machines.
    """

    def __init__(self, *given: Any, run: Run | None = None, **keywords: Any) -> None:
        """The Trainer's arguments. `train_dataset` may be a function that returns it: guests do not call it.

        `run` is the result of `potluck.start(host=True)`, if the script hosts by itself.
        """
        refuse_trainer(type(self))
        self._run = start() if run is None else run
        self._steps: Iterator[Step] | None = None
        self._pushed: PushedLoader | None = None
        self._coming: list[Samples] = []
        self._collate: Callable[[list[Any]], Any] | None = None
        self._flos = 0.0
        if not any(isinstance(each, TrainingArguments) for each in (*given, *keywords.values())):
            keywords["args"] = TrainingArguments(output_dir="tmp_trainer", report_to="none")
        given = tuple(self._arguments(each) for each in given)
        keywords = {name: self._arguments(each) for name, each in keywords.items()}
        data = keywords.get("train_dataset")
        if makes_data(data) and any(base.__module__.startswith("trl.") for base in type(self).__mro__):
            raise ConfigError(
                f"{type(self).__name__} reads its data set in its constructor, on guests too",
                hint="give train_dataset= the data set itself, not a function that returns it",
            )
        if self._run.is_guest:
            keywords |= {"callbacks": None, "train_dataset": None if makes_data(data) else data}
        elif makes_data(data):
            keywords["train_dataset"] = opened(data)
        super().__init__(*given, **keywords)
        refuse_accelerator(self.accelerator)
        if self.args.device.type != self._run.device.type:
            raise ConfigError(
                f"the Trainer computes on {self.args.device}, and Potluck on {self._run.device}",
                hint="give both the same: TrainingArguments(use_cpu=True) and --device cpu, or neither",
            )

    def _arguments(self, given: Any) -> Any:
        """The Trainer's arguments: checked, and on a guest without what only the host does."""
        if not isinstance(given, TrainingArguments):
            return given
        refuse_arguments(given)
        if self._run.is_guest:
            given = copy.copy(given)
            given.report_to, given.eval_strategy, given.push_to_hub = [], "no", False
            given.save_strategy, given.load_best_model_at_end = "no", False
            given.disable_tqdm, given.output_dir = True, tempfile.gettempdir()
        return given

    # -- what the Trainer calls -------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **keywords: Any) -> Any:
        """Train. On a guest this computes until the run is over, and the script ends here."""
        if self._run.is_guest:
            return super().train()
        if not resume_from_checkpoint and self._run.is_resumed:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        self._steps = self._pushed = None
        try:
            output = super().train(resume_from_checkpoint, *given, **keywords)
        except BaseException as error:
            self._run.close(error)
            raise
        stopped = self._run.stop_requested
        self._run.close()
        if stopped:
            raise self._run._context.interruption
        return output

    def get_train_dataloader(self) -> Any:
        """The Trainer's own loader, which returns single samples. The Trainer calls this first in a training."""
        if self._run.is_guest:
            self._help()
        config = self.accelerator.dataloader_config
        dispatched, config.dispatch_batches = (
            config.dispatch_batches,
            False,
        )  # else a stream's batches must be tensors
        try:
            loader = super().get_train_dataloader()
        finally:
            config.dispatch_batches = dispatched
        base = getattr(loader, "base_dataloader", loader)  # Accelerate's loaders have a loader inside
        self._collate, base.collate_fn = base.collate_fn, Samples
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *given: Any) -> tuple[Any, None]:
        self._coming = list(itertools.islice(epoch_iterator, num_batches))
        return list(self._coming), None

    def training_step(self, model: Any, inputs: Any, *given: Any, **keywords: Any) -> torch.Tensor:
        """Run the whole step with its last batch: compute this machine's part, and add the others' gradients."""
        self._flos = 0.0
        if inputs is not self._coming[-1]:
            return torch.zeros((), device=self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if self._steps is None:
            self._begin()
        assert self._steps is not None and self._pushed is not None
        samples = [sample for part in self._coming for sample in part.unpacked()]
        self._pushed.push(samples)
        step, own = next(self._steps), 0
        for batch in step:
            own += find_batch_size(batch) or 0
            self._flos += super().floating_point_ops(batch)
            self._compute(model, step, batch)
        self._flos *= len(samples) / max(1, own)
        if self._run.stop_requested:
            self.control.should_save = self.control.should_training_stop = True
        return torch.tensor(step.loss, device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> Any:
        return self._flos if isinstance(inputs, Samples) else super().floating_point_ops(inputs)

    # -- one machine's part -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open the run's steps: model and optimizer are as the Trainer has prepared them."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's has torch's inside
        self._pushed = PushedLoader(
            self._batch_of,
            global_batch=self._global_batch(),
            first_step=self.state.global_step,
            steps=self.state.max_steps,
        )
        self._steps = self._run.steps(self.model, optimizer, self._pushed)

    def _help(self) -> None:
        """Compute leases until the run is over, which ends the script."""
        model = self.accelerator.prepare_model(self.model)
        model.train()
        steps: Any = self._run.steps
        for step in steps(self.model, None, None, global_batch=self._global_batch()):
            self.state.global_step = step.index
            for batch in step:
                self._compute(model, step, batch)

    def _compute(self, model: Any, step: Step, batch: Any) -> None:
        """One micro-batch: its loss is the mean over its own items, and items weigh it in the step."""
        inputs = self._prepare_inputs(batch)
        _, items = super().get_batch_samples(iter([inputs]), 1, self.args.device)
        with self.compute_loss_context_manager():
            divisor = items.clamp(min=1) if isinstance(items, torch.Tensor) else items
            loss = self.compute_loss(model, inputs, num_items_in_batch=divisor)
        step.backward(loss, items=items)

    def _batch_of(self, samples: list[Any]) -> Any:
        assert self._collate is not None
        batch = self._collate(samples)
        return dict(batch) if isinstance(batch, Mapping) else batch

    def _global_batch(self) -> int:
        return int(self._train_batch_size * self.args.gradient_accumulation_steps)


def potluck_trainer(base: type[Any]) -> type[Any]:
    """A subclass of the Trainer (TRL's SFTTrainer, your own) whose steps are computed by all machines of a run."""
    if not issubclass(base, PlainTrainer):
        raise ConfigError(f"{base.__name__} is not a Hugging Face Trainer", hint="give a subclass of Trainer")
    refuse_trainer(base)
    return type(f"Potluck{base.__name__}", (Trainer, base), {"__doc__": base.__doc__})


# -- what cannot be shared out ------------------------------------------------------------------------------


def refuse_trainer(base: type[Any]) -> None:
    """Refuse methods that guests cannot share: they have the weights only during a step, and need complete
    samples."""
    above = itertools.takewhile(lambda each: each is not PlainTrainer, base.__mro__)
    if any("generate" in name for each in above for name in vars(each)):
        raise LoopError(
            f"{base.__name__} generates text inside its steps, from weights that change: guests cannot share that",
            hint="train on texts that exist before the step, as SFTTrainer and DPOTrainer do",
        )


def refuse_arguments(args: Any) -> None:
    """Refuse other ways to use several devices, and options that change a step while it is computed."""
    whole = "take it out: every machine holds the whole model"
    refused = (
        (args.fsdp, "FSDP", whole),
        (args.deepspeed, "DeepSpeed", whole),
        (getattr(args, "parallelism_config", None), "tensor, context or sequence parallelism", whole),
        (args.n_gpu > 1, "DataParallel over several GPUs", "let the process see one GPU: CUDA_VISIBLE_DEVICES=0"),
        (args.world_size > 1, "torchrun or accelerate launch", ONE_PROCESS),
        (args.fp16, "fp16 with a GradScaler", "use bf16=True: it has the range of float32 and needs no scaling"),
        (args.auto_find_batch_size, "auto_find_batch_size", "take it out: each machine measures what fits"),
        (getattr(args, "activation_offloading", False), "activation_offloading", "use gradient_checkpointing=True"),
        (
            getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False),
            "include_num_input_tokens_seen",
            "take it out: padding differs between machines, so nobody knows this number",
        ),
    )
    for found, what, instead in refused:
        if found:
            raise ConfigError(f"{what} cannot be used with Potluck's Trainer", hint=instead)


def refuse_accelerator(accelerator: Any) -> None:
    """The same for settings in Accelerate's own configuration."""
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind != "NO":
        raise ConfigError(f"Accelerate was set up for {kind}, which Potluck's Trainer cannot use", hint=ONE_PROCESS)
