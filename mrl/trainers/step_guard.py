"""Ends the run with one line after a step that fails: what is wrong, its batch's file and the last good state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mrl.batch import Batch
from mrl.engine import guards
from mrl.engine.base import GradNorm
from mrl.errors import TrainingError
from mrl.roles.dispatch import StepResult, WorkerDispatch
from mrl.trainers.common import last_good, problems_in_words
from mrl.trainers.run_directory import RunDirectory


class StepGuard:
    """Checks the optimizer steps of a run's one model: losses and norms are finite, and the first step trains all that
    it should."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        directory: RunDirectory,
        *,
        head: str,  # the model's
        watches_parameters: bool,  # train.guards
        rows: Callable[[], Sequence[str]],  # file and line of each sequence of the batch at hand
    ) -> None:
        self._dispatch, self._directory, self._rows = dispatch, directory, rows
        self.watches_parameters = watches_parameters
        self._below_zero_head = head == "value"  # which may start at zero

    def before_update(self, step: int, batch: Batch, loss: float) -> None:
        """Checks the loss of `step`."""
        if not math.isfinite(loss):
            raise self._failed(step, batch, f"the loss is {loss}")

    def after_update(self, step: int, batch: Batch, result: StepResult) -> None:
        """Checks the gradient norm and, until every parameter has been seen to train, what the update did to them."""
        problems = guards.confirmed_faults(result.problems)
        if self._below_zero_head:
            problems = [problem for problem in problems if problem.kind is not guards.FaultKind.ZERO_GRADIENT]
            self._below_zero_head = False
        if fault := norm_fault("the gradient norm", result.grad_norm, problems):
            raise self._failed(step, batch, fault)
        if problems:
            raise self._failed(
                step, batch, f"the first step did not train the model as it should: {problems_in_words(problems)}"
            )
        # Two findings are no fault. An adapter's A has no gradient while its B is 0. Layers below a value head of zeros
        # have none before the head moves. So the next step is watched, too.
        self.watches_parameters = bool(result.problems)

    def _failed(self, step: int, batch: Batch, what: str) -> TrainingError:
        return failed_step(self._dispatch, self._directory, step, batch, what, rows=self._rows(), kept_as="the batch")


def norm_fault(name: str, grad_norm: GradNorm, problems: Sequence[guards.Problem]) -> str | None:
    """Returns the fault of a gradient norm, with the first problems of parameters; None where the step was made."""
    if grad_norm.skipped is None and math.isfinite(grad_norm):
        return None
    why = f" ({grad_norm.skipped})" if grad_norm.skipped else ""
    return "; ".join([f"{name} is {float(grad_norm)}{why}", *map(str, problems[:5])])


def failed_step(
    dispatch: WorkerDispatch, directory: RunDirectory, step: int, batch: Batch, what: str, *, rows: Sequence[str],
    kept_as: str,
) -> TrainingError:  # fmt: skip
    """Saves the batch of `step`. Returns an error that names the fault, the file and the last good state.
    Collective."""
    path = dispatch.on_main(lambda: directory.save_failed_batch(step, batch, rows))
    return TrainingError(f"step {step}: {what}; {kept_as} is in {path}; {last_good(dispatch, directory, step - 1)}")
