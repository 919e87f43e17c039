"""Ends the run with one line after a step that fails: what is wrong, its batch's file and the last good state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mrl.batch import Batch
from mrl.engine.guards import FaultKind, confirmed_faults
from mrl.errors import TrainingError
from mrl.roles.dispatch import MODEL, StepResult
from mrl.trainers.common import last_good, problems_in_words
from mrl.trainers.trainer import Trainer


class StepGuard:
    """Checks one optimizer step of a role: its numbers are finite and, with train.guards, every parameter trains.

    The run's progress says what earlier steps have shown: a role's steps are watched until every parameter of it has
    changed once. A gradient of zero is no fault in three cases. All are zero if no advantage, or no error of a value,
    differs from 0 (`may_be_zero`). In the first step with a gradient, all below a value head is zero because the head
    may start at zero. A of an adapter waits for B to move.
    """

    def __init__(
        self, trainer: Trainer, role: str, batch: Batch, *, head: str, may_be_zero: bool, rows: Sequence[str] = ()
    ) -> None:
        """rows: file and line of each sequence of the batch."""
        self._trainer, self._role, self._batch, self._rows = trainer, role, batch, rows
        self._head, self._may_be_zero = head, may_be_zero
        self._of = "" if role == MODEL else f"{role}'s "
        self.watches_parameters = trainer.config.train.guards and role not in trainer.progress.trained

    def before_update(self, loss: float) -> None:
        """Checks the loss."""
        if not math.isfinite(loss):
            raise self._failed(f"the {self._of}loss is {loss}")

    def after_update(self, result: StepResult) -> None:
        """Checks the gradient norm and, while parameters are watched, that they changed."""
        problems, norm = confirmed_faults(result.problems), result.grad_norm
        if norm.skipped is not None or not math.isfinite(norm):
            why = f" ({norm.skipped})" if norm.skipped else ""
            what = f"the {self._of}gradient norm is {float(norm)}{why}"
            raise self._failed("; ".join(filter(None, [what, problems_in_words(problems)])))
        if not self.watches_parameters:
            return
        progress, role = self._trainer.progress, self._role
        has_gradient, an_adapter_waits = float(norm) != 0, len(problems) < len(result.problems)
        if (self._may_be_zero and not has_gradient) or (self._head == "value" and role not in progress.moved):
            problems = [problem for problem in problems if problem.kind is not FaultKind.ZERO_GRADIENT]
        elif not problems and not an_adapter_waits:
            progress.trained.append(role)
        if has_gradient and role not in progress.moved:
            progress.moved.append(role)
        if problems:
            raise self._failed(f"the step did not train the {role} as it should: {problems_in_words(problems)}")

    def _failed(self, what: str) -> TrainingError:
        """Saves the batch. Returns an error that names the fault, the file and the last good state. Collective."""
        trainer, step = self._trainer, self._trainer.progress.step + 1
        dispatch, directory = trainer.dispatch, trainer.directory
        path = dispatch.on_main(lambda: directory.save_failed_batch(step, self._batch, self._rows))
        good = last_good(dispatch, directory, step - 1)
        return TrainingError(f"step {step}: {what}; the batch is in {path}; {good}")
