"""Rollouts that are allowed and should still be seen: what the console says of them, and how often."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrl.algorithms.advantages import ESTIMATORS
from mrl.algorithms.recipes import Recipe
from mrl.algorithms.shaping import groups_with_signal
from mrl.batch import Batch
from mrl.rollout.base import Trajectory


class _RecurringNotice:
    """Count rollouts in a row that are to be reported: the first such one, and each 10th in a row."""

    EVERY = 10

    def __init__(self) -> None:
        self._in_a_row, self._reported = 0, False

    def count(self, happens: bool) -> str | None:
        """Returns the number of rollouts in a row, in words ("" for the first); None where this one is not reported."""
        self._in_a_row = self._in_a_row + 1 if happens else 0
        if not happens or (self._reported and self._in_a_row % self.EVERY):
            return None
        self._reported = True
        return f" ({self._in_a_row} rollouts in a row)" if self._in_a_row > 1 else ""


class EqualRewards:
    """Notices rollouts from which an algorithm of group differences learns nothing.

    They are allowed: a task may be too hard at first, and such a step leaves the policy about where it is. But a run of
    them is a mistake that a person should see.
    """

    def __init__(self) -> None:
        self._rollouts = _RecurringNotice()

    def note(self, batch: Batch, scores_S: Tensor, recipe: Recipe) -> str | None:
        """Returns the line to show of a rollout, for the first such one and each 10th in a row. scores_S: in the order
        of `batch`."""
        # A KL or a length in the rewards makes advantages of equal rewards larger.
        small = float(batch.token_fields["advantages"].abs().max()) < 1e-6
        groups_S = batch.sequence_fields["groups"]
        grouped = ESTIMATORS[recipe.advantage].needs == "groups_S"
        equal = grouped and small and not bool(groups_with_signal(scores_S, groups_S).any())
        count = self._rollouts.count(equal)
        if count is None:
            return None
        terms = (("the KL", recipe.kl_in in ("loss", "exact")), ("the entropy", recipe.entropy_coef != 0))
        beside = [what for what, is_there in terms if is_there]
        nothing = "nothing but " + " and ".join(beside) if beside else "nothing"
        return (
            f"every group's rewards are equal{count}: this rollout trains {nothing}; if it stays so, give prompts of "
            "another difficulty, more rollout.samples_per_prompt, or rewards that tell completions apart"
        )


class TokenLimit:
    """Notices rollouts of which most conversations end by the limit of tokens: the policy is then rewarded for
    beginnings."""

    def __init__(self, max_new_tokens: int) -> None:
        self._max_new_tokens, self._rollouts = max_new_tokens, _RecurringNotice()

    def note(self, trajectories: Sequence[Trajectory]) -> str | None:
        """Returns the line to show of a rollout, for the first such one and each 10th in a row."""
        conversations = [t for t in trajectories if t.conversation is not None]
        cut = sum(t.cut_by == "tokens" for t in conversations)
        count = self._rollouts.count(2 * cut > len(conversations))
        if count is None:
            return None
        return (
            f"{cut} of {len(conversations)} conversations ended by the limit of tokens{count}: rollout.max_new_tokens "
            f"{self._max_new_tokens} counts observations too; raise it, or make turns and observations shorter "
            "(rollout.max_turn_tokens, max_turns)"
        )
