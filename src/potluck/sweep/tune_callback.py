"""The callback by which Ray Tune tells a sweep's driver of its trials. Imports Ray."""

from __future__ import annotations

from typing import Any

from ray.tune import Callback

from potluck.sweep.ray_trials import TrialWatch, watches


class IdleMachinesHelp(Callback):  # type: ignore[misc]
    """Passes what Tune tells on to a `TrialWatch`, which lives in this process only: Tune pickles callbacks."""

    def __init__(self, public: bytes) -> None:
        """`public`: the key of the trainable."""
        self._public = public
        self.watch: TrialWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_public": self._public, "watch": None}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self.watch is None:
            self.watch = watches[self._public]()
        self.watch.trials(trials)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if self.watch is not None:
            self.watch.result(trial.trial_id, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if self.watch is not None:
            self.watch.ended(trial.trial_id, trials.index(trial))

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        if self.watch is not None:
            self.watch.close()
