"""The interface for a user's script: `start()` and the `Run` that it returns.

Owns the public interface of training. A run's life is in `session`, the steps are in the two loops.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from potluck import env, failpoints
from potluck.balance.ledger import Ledger
from potluck.errors import LoopError
from potluck.hub.alone import AloneHub
from potluck.hub.guest import GuestHub
from potluck.hub.model_tensors import ModelTensors
from potluck.spec.config import RunConfig
from potluck.spec.events import Logged, RunEvent, RunNote
from potluck.train import host_ranks
from potluck.train.batch_statistics import batch_statistics, least_samples
from potluck.train.checkpoint import Loaded
from potluck.train.context import ALONE, GUEST, HOST, RANK, RunContext
from potluck.train.given import as_number, check_model, check_optimizer, check_scheduler
from potluck.train.guest_loop import GuestParts, GuestTrainer
from potluck.train.host_hub import open_hub
from potluck.train.host_loop import HostTrainer
from potluck.train.launch import current
from potluck.train.microbatch import MicroBatch
from potluck.train.optimizer_state import Stateful
from potluck.train.options import Options, make_options
from potluck.train.packing import Collate
from potluck.train.parts import Parts
from potluck.train.pushed import PushedLoader
from potluck.train.rank_loop import (
    RankParts,
    RankTrainer,
    about_rank,
    refuse_synchronized,
    restore_same,
)
from potluck.train.resuming import restore
from potluck.train.script_state import ScriptState
from potluck.train.session import alone
from potluck.train.step import Step
from potluck.train.step_loader import DataSetLoader, StepLoader
from potluck.train.torch_loader import batch_of, length_if_any, open_steps, reader_of

LARGEST_GUEST_MICRO_BATCH = 16
"""The largest size that the search tries on a guest; with batch statistics it is the global batch."""

MOST_TOGETHER = 256
"""The same with batch statistics where the global batch is not known: only the host has opened the loader."""


class Run:
    """One training, seen from this machine."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.state = ScriptState()
        """The script's own values: the best loss, sums, anything like JSON, objects with a `state_dict()`.

        Each checkpoint has them. Values set before `steps` is called are used in a new run; a resumed run replaces
        them with the saved ones. Only the host's is saved.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the current training, if any: finished, or failed with `error`. The end of the script does this
        too."""
        if self.is_host:
            self._context.loop.end("finished" if error is None else "failed")

    @property
    def token(self) -> str | None:
        """On a host: the secret that guests join with; None elsewhere."""
        return self._context.admission.token if self._context.admission is not None else None

    @property
    def join_line(self) -> str | None:
        """On a host: the command to type on each machine that should help; None elsewhere."""
        return f"potluck join {self.token}" if self.token is not None else None

    @property
    def page_url(self) -> str | None:
        """Address of the page in the browser; None without `web`. Everybody with this address can see the run."""
        return self._context.page_url

    @property
    def role(self) -> str:
        """ "alone", "host" or "guest"; "rank" in the host's processes under torchrun other than rank 0."""
        return self._context.role

    @property
    def is_guest(self) -> bool:
        return self._context.role == GUEST

    @property
    def is_host(self) -> bool:
        """True in the process that owns the weights: the host's, or the only one."""
        return self._context.role in (HOST, ALONE)

    @property
    def is_resumed(self) -> bool:
        """Whether this run resumes an earlier one."""
        return self._context.resume

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested (Ctrl-C)."""
        return self._context.loop.stop_requested()

    @property
    def device(self) -> torch.device:
        """The device for the model on this machine."""
        return self._context.device.torch_device

    def log(self, **values: Any) -> None:
        """Write numbers of your own into the run's log and view, such as a validation loss: run.log(val=0.31).

        On the host only: elsewhere it does nothing.
        """
        if self.is_host:
            numbers = {name: as_number(name, value) for name, value in values.items()}
            self._context.log.emit(Logged(step=self._context.loop.steps_done(), values=numbers))

    def steps(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any,
        *,
        global_batch: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        clip_norm: float | None = None,
        scheduler: Any = None,
        collate: Collate | None = None,
        data: str = "sent",
        seed: int = 0,
        micro_batch: int | None = None,
        loss_is: str = "mean",
        before_update: Callable[[nn.Module], None] | None = None,
        also_save: Mapping[str, Stateful] | None = None,
        tokens_per_sample: int | None = None,
        **unknown: Any,
    ) -> Iterator[Step]:
        """The steps of the training; each is iterated for its batches (see `Step`).

        Args:
            model: on `run.device`. Trained are the parameters that require a gradient.
            optimizer: any torch optimizer over them; stepped on the host only.
            loader: a torch DataLoader: a step is one of its batches, in its own order, and its worker processes
                read ahead. Or a data set with `global_batch`. Or a function that returns either, called only where
                samples are read: on guests only with `data="local"`.
            global_batch: samples in every step, over all machines. Needed with a data set. With a DataLoader a
                step is one of its batches: leave this out; any number except its batch size is refused.
            steps: total number of steps; a resumed run continues up to it. Endless without it and `epochs`.
            epochs: total number of epochs; with `steps`, whichever ends first.
            clip_norm: clip the gradient of the whole step to this norm before the update.
            scheduler: a learning-rate scheduler, stepped after every step and saved in checkpoints.
                ReduceLROnPlateau gets the step's loss.
            collate: makes a batch of a data set's samples; torch's default_collate if not given.
            data: "sent": the host sends samples with the leases. "local": each guest has the data set itself.
            seed: random seed for the order of a data set's samples. A DataLoader has its own order.
            micro_batch: samples computed at once, on every machine without its own setting; measured if not given.
            loss_is: whether step.backward is given the "mean" or the "sum" over its samples (or items). The update
                is that of the mean in both cases. A plain loop with a summed loss has a summed gradient: for its
                updates with SGD multiply lr by the batch size, and divide clip_norm and weight decay by it.
            before_update: called with the model once its gradients are complete, before clipping and the update.
            also_save: more objects to save in checkpoints, by name; with state_dict() and load_state_dict().
            tokens_per_sample: shows tokens/s and, on known GPUs, their utilisation.
            unknown: refused, with the nearest name.
        """
        self._begin()
        options = make_options(
            unknown,
            global_batch=global_batch,
            steps=steps,
            epochs=epochs,
            clip_norm=clip_norm,
            scheduler=scheduler,
            collate=collate,
            data=data,
            seed=seed,
            micro_batch=micro_batch,
            loss_is=loss_is,
            before_update=before_update,
            also_save=also_save or {},
            tokens_per_sample=tokens_per_sample,
            by_trainer=isinstance(loader, PushedLoader),
        )
        check_model(model)
        if self._context.ranks is not None and self._context.role == HOST:
            refuse_synchronized(model)
        tensors = ModelTensors(model)
        if not self.is_guest:  # there it is never stepped
            check_optimizer(optimizer, tensors.trained)
            check_scheduler(options.scheduler, optimizer)
        if self.is_guest:
            return self._guest(options, model, loader, tensors)
        if self._context.role == RANK:
            return self._rank(options, model, optimizer, loader, tensors)
        return self._host(options, model, optimizer, loader, tensors)

    def _begin(self) -> None:
        context = self._context
        if context.loop.began:
            if context.role != ALONE or context.folder is not None or context.ranks is not None:
                if context.loop.entered:
                    raise second_loop()
                raise LoopError(
                    "run.steps() was called twice in one run",
                    hint="for several epochs call it once, with epochs=N, and run the code that ends an epoch when "
                    "step.ends_epoch is true; to train several models in one program, start it with plain python "
                    "and host from it with run = potluck.start(host=True)",
                )
            context.loop.finish()  # a loop that was left by an error may still be open
        context.loop.began = True

    # -- host and alone ---------------------------------------------------------------------------------

    def _host(
        self,
        options: Options,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        given: Any,
        tensors: ModelTensors,
    ) -> Iterator[Step]:
        context = self._context
        context.device.attach(model)
        loader = self._open_loader(options, given)
        statistics = batch_statistics(model)
        # Now: to resume, or to know the first step's size, workers begin to read before the loop does.
        fixed = context.config.micro_batch or options.micro_batch or 0
        loader.cut(fixed if statistics is None else 0, anyhow=context.role == HOST)
        objects = {**options.saved_objects(), **loader.objects()}
        if isinstance(loader, PushedLoader):
            restored, first = None, loader.first_step
        else:
            restored = restore(context, options, model, optimizer, objects, loader, self.state)
            first = restored.step if restored is not None else 0
        ledger = Ledger(loader, step=first)
        options = dataclasses.replace(options, global_batch=self._usual_batch(loader, ledger))
        least = least_samples(statistics, options.usual_batch)
        micro = self._micro_batch(options, limit=options.usual_batch, statistics=statistics is not None)
        if context.ranks is not None:
            self._meet_ranks(context.ranks, restored, loader, tensors, micro)
        if restored is not None:
            micro.settled = restored.place.micro_batch
        parts = Parts(
            context=context,
            options=options,
            model=model,
            optimizer=optimizer,
            loader=loader,
            tensors=tensors,
            ledger=ledger,
            micro=micro,
            statistics=statistics,
            least=least,
            restored=restored,
            objects=objects,
            state=self.state,
        )
        try:
            hub = open_hub(context, parts) if context.role == HOST else AloneHub(ledger, context.name, least)
        except BaseException:
            loader.close()
            if context.ranks is not None:
                context.ranks.end()
            raise
        return HostTrainer(parts, hub).steps()

    def _open_loader(self, options: Options, given: Any) -> StepLoader:
        context = self._context
        if isinstance(given, PushedLoader):
            return given

        def note(text: str) -> None:
            context.log.emit(RunNote(text=text))

        loader = open_steps(
            given,
            global_batch=options.global_batch,
            collate=options.collate,
            seed=options.seed,
            epochs=options.epochs,
            by_index=context.ranks is not None,
            note=note,
        )
        if options.data == "local":
            loader.check_indices()
        if isinstance(loader, DataSetLoader) and loader.global_batch > loader.samples:
            text = f"a step of {loader.global_batch} samples is more than the data set has ({loader.samples}): "
            note(text + "samples come several times in a step")
        return loader

    def _usual_batch(self, loader: StepLoader, ledger: Ledger) -> int:
        """A user's batch sampler may not know it; then the first step determines it."""
        if loader.global_batch is not None:
            return loader.global_batch
        first = ledger.prepare()
        return first.count if first is not None else 1

    # -- several ranks ----------------------------------------------------------------------------------

    def _meet_ranks(
        self,
        group: host_ranks.Ranks,
        restored: Loaded | None,
        loader: StepLoader,
        tensors: ModelTensors,
        micro: MicroBatch,
    ) -> None:
        """Bring the other ranks to this rank's step, and check that they train the same model."""
        about = about_rank(tensors, loader.samples, micro.free_bytes)
        checkpoint = str(restored.path.resolve()) if restored is not None else None
        for rank, said in enumerate(group.introduce(checkpoint), 1):
            for what, theirs, ours in (
                ("model", said.model, about.model),
                ("data set", said.samples, about.samples),
            ):
                if theirs != ours:
                    raise LoopError(
                        f"rank {rank} has another {what} than rank 0 ({theirs}, not {ours})",
                        hint="the script must build the same on every rank",
                    )
            if micro.free_bytes is not None and said.free_bytes is not None:
                micro.free_bytes = min(micro.free_bytes, said.free_bytes)
        micro.limit = -(-micro.limit // group.world)
        group.equalize([*tensors.trained, *tensors.fixed.values()])

    def _rank(
        self,
        options: Options,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        given: Any,
        tensors: ModelTensors,
    ) -> Iterator[Step]:
        context = self._context
        group = context.ranks
        assert group is not None
        context.device.attach(model)
        objects = options.saved_objects()
        loader, nominal = reader_of(given, options.collate, options.global_batch)
        checkpoint = group.meet()
        if checkpoint is not None:
            restore_same(Path(checkpoint), model, optimizer, objects, self.state)
        micro = self._micro_batch(options, limit=nominal or LARGEST_GUEST_MICRO_BATCH)
        group.answer(about_rank(tensors, length_if_any(loader.dataset), micro.free_bytes))
        group.equalize([*tensors.trained, *tensors.fixed.values()])
        parts = RankParts(
            context=context, options=options, model=model, optimizer=optimizer, loader=loader, tensors=tensors
        )
        return RankTrainer(parts, group).steps()

    # -- guest ------------------------------------------------------------------------------------------

    def _guest(self, options: Options, model: nn.Module, given: Any, tensors: ModelTensors) -> Iterator[Step]:
        context = self._context
        assert context.link is not None and context.welcome is not None
        welcome = context.welcome.message
        together = batch_statistics(model) is not None
        reader, nominal = None, options.global_batch or batch_of(given)
        if options.data == "local":
            reader, nominal = reader_of(given, options.collate, options.global_batch)
        limit = nominal or MOST_TOGETHER if together else LARGEST_GUEST_MICRO_BATCH
        hub = GuestHub(
            context.link,
            tensors,
            down=welcome.codec_down,
            up=welcome.codec,
            device=context.device,
        )
        parts = GuestParts(
            context=context,
            options=options,
            model=model,
            tensors=tensors,
            hub=hub,
            loader=reader,
            micro=self._micro_batch(options, limit=limit, statistics=together),
        )
        return GuestTrainer(parts).steps()

    def _micro_batch(self, options: Options, *, limit: int, statistics: bool = False) -> MicroBatch:
        return MicroBatch(
            fixed=self._context.config.micro_batch or options.micro_batch,
            limit=limit,
            free_bytes=self._context.device.memory().free_bytes,
            statistics=statistics,
            # Elsewhere too large a size, tried after hours, could end the run: there is no memory to spare.
            reviews=self._context.device.torch_device.type == "cpu",
            whole=self._context.role == ALONE,
        )


def second_loop() -> LoopError:
    """The error for a `run.steps` that is called while the training of an earlier one is running."""
    return LoopError(
        "run.steps() was called while an earlier run.steps() of this program is still open",
        hint="end the first loop before the second one begins; models that are trained in turns, such as a GAN, "
        "train without guests: plain python, run = potluck.start() without host=True or web=True, and zip",
    )


def start(
    show: Callable[[RunEvent], None] | None = None, config: RunConfig | None = None, *, shows_steps: bool = True
) -> Run:
    """The run that this process was started for. Without one, a run alone, whose events go to `show`.

    `shows_steps`: False if it ignores single steps. Then it does not get them.
    """
    if (context := current()) is not None:
        return Run(context)
    environment = env.read()
    failpoints.arm(environment.failpoint)
    return Run(alone(environment, show, what=sys.argv[0], config=config, shows_steps=shows_steps))
