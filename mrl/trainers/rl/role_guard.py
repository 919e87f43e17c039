"""Checks of a role's optimizer step (train.guards), beside those of any step: that its numbers are finite."""

from __future__ import annotations

import math

from torch import Tensor

from mrl.batch import Batch
from mrl.engine.guards import FaultKind, Problem, confirmed_faults
from mrl.errors import TrainingError
from mrl.roles.dispatch import StepResult
from mrl.trainers.common import problems_in_words
from mrl.trainers.rl import invariants
from mrl.trainers.rl.trainer import PPOTrainer
from mrl.trainers.step_guard import failed_step, norm_fault


class RoleGuard:
    """Checks one step of a role on a mini-batch. The run's progress says what earlier steps have shown.

    Every parameter of a role must change once; its steps are watched until they have. A gradient of zero is no fault in
    three cases. All are zero if no advantage, or no error of a value, differs from 0. In the critic's first step with a
    gradient, all below a value head is zero because the head starts at zero. A of an adapter waits for B to move.
    """

    def __init__(self, trainer: PPOTrainer, role: str, batch: Batch) -> None:
        self._trainer, self._progress, self._role, self._batch = trainer, trainer.progress, role, batch
        self._enabled = trainer.config.train.guards
        self.watches_parameters = self._enabled and role not in self._progress.trained

    def before_update(self, loss: float, predicted_T: Tensor) -> None:
        """Checks the loss, and before the actor's first update that every ratio is 1."""
        if not math.isfinite(loss):
            raise self._failed(f"the {self._role}'s loss is {loss}")
        if self._enabled and self._role == "actor" and self._is_first_of_actor():
            invariants.check_ratios(predicted_T, self._batch)
            self._progress.exact = True

    def after_update(self, result: StepResult) -> None:
        """Checks the gradient norm and, while parameters are watched, that they changed."""
        problems = confirmed_faults(result.problems)
        if fault := norm_fault(f"the {self._role}'s gradient norm", result.grad_norm, problems):
            raise self._failed(fault)
        if self.watches_parameters:
            self._check_parameters(result, problems)

    def _check_parameters(self, result: StepResult, problems: list[Problem]) -> None:
        progress, role = self._progress, self._role
        has_gradient, an_adapter_waits = float(result.grad_norm) != 0, len(problems) < len(result.problems)
        if not has_gradient or (role == "critic" and role not in progress.moved):
            problems = [p for p in problems if p.kind is not FaultKind.ZERO_GRADIENT]
        elif not problems and not an_adapter_waits:
            progress.trained.append(role)
        if has_gradient and role not in progress.moved:
            progress.moved.append(role)
        if problems:
            raise self._failed(f"the step did not train the {role} as it should: {problems_in_words(problems)}")

    def _is_first_of_actor(self) -> bool:
        """Returns whether the actor makes its first step, on a mini-batch whose old log-probs were computed with the
        same neighbours."""
        config, step = self._trainer.config, self._progress.step
        _, number = self._trainer.position(step)
        in_first_epoch = number * config.mini_batch_size < config.train.global_batch_size
        return step == config.algorithm.critic_warmup and in_first_epoch

    def _failed(self, what: str) -> TrainingError:
        trainer, step = self._trainer, self._progress.step + 1
        return failed_step(
            trainer.dispatch, trainer.directory, step, self._batch, what, rows=[], kept_as="the mini-batch"
        )
