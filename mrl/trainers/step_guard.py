"""A step that fails ends the run with one line: what is wrong, where its batch and the last good state are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mrl.batch import Batch
from mrl.engine import guards
from mrl.engine.base import BaseEngine, GradNorm
from mrl.errors import TrainingError
from mrl.trainers.common import Ranks, last_good, problems_in_words
from mrl.trainers.run_directory import RunDirectory


class StepGuard:
    """Checks the optimizer steps of one engine: losses and norms are finite, and the first step trains all that it
    should."""

    def __init__(
        self,
        engine: BaseEngine,
        directory: RunDirectory,
        *,
        watches_parameters: bool,  # train.guards
        rows: Callable[[], Sequence[str]],  # file and line of each sequence of the batch at hand
    ) -> None:
        self._engine, self._directory, self._rows = engine, directory, rows
        self._watches_parameters = watches_parameters
        self._below_zero_head = engine.config.head == "value"  # which may start at zero
        self._before = None

    def before_update(self, step: int, batch: Batch, loss: float) -> None:
        """Checks the loss of `step`, and notes the parameters as they are before its update."""
        if not math.isfinite(loss):
            raise self._failed(step, batch, f"the loss is {loss}")
        if self._watches_parameters:
            self._before = self._engine.guard_before_step()

    def after_update(self, step: int, batch: Batch, grad_norm: GradNorm) -> None:
        """Checks the gradient norm and, until every parameter has been seen to train, what the update did to them."""
        findings = self._engine.guard_after_step(self._before) if self._watches_parameters else []
        self._before = None
        problems = guards.confirmed_faults(findings)
        if self._below_zero_head:
            problems = [problem for problem in problems if problem.kind is not guards.FaultKind.ZERO_GRADIENT]
            self._below_zero_head = False
        if fault := norm_fault("the gradient norm", grad_norm, problems):
            raise self._failed(step, batch, fault)
        if problems:
            raise self._failed(
                step, batch, f"the first step did not train the model as it should: {problems_in_words(problems)}"
            )
        # A finding that is no fault is an adapter's A, which trains a step after its B, or what is below a value head
        # that starts at zero: the next step is watched too.
        self._watches_parameters = bool(findings)

    def _failed(self, step: int, batch: Batch, what: str) -> TrainingError:
        return failed_step(self._engine, self._directory, step, batch, what, rows=self._rows(), kept_as="the batch")


def norm_fault(name: str, grad_norm: GradNorm, problems: Sequence[guards.Problem]) -> str | None:
    """Returns the fault of a gradient norm, with the first problems of parameters; None where the step was made."""
    if grad_norm.skipped is None and math.isfinite(grad_norm):
        return None
    why = f" ({grad_norm.skipped})" if grad_norm.skipped else ""
    return "; ".join([f"{name} is {float(grad_norm)}{why}", *map(str, problems[:5])])


def failed_step(
    ranks: Ranks, directory: RunDirectory, step: int, batch: Batch, what: str, *, rows: Sequence[str], kept_as: str
) -> TrainingError:
    """Saves the batch of `step`, which failed, and says what happened and where the last good state is. Collective."""
    path = ranks.on_main(lambda: directory.save_failed_batch(step, batch, rows))
    return TrainingError(f"step {step}: {what}; {kept_as} is in {path}; {last_good(ranks, directory, step - 1)}")
