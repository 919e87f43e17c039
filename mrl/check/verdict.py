"""Gives the verdict on a layout: the same, or the quantity that differs, its parameter, and its distance from the
bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mrl.check.compare import TensorErrors
from mrl.check.measure import LayoutComparison

UNDECIDED = (
    "a router scores two experts alike for some tokens, and may have chosen the other one, from where on all differs"
)
OTHER_BATCH = "take another batch with --tokens or seed, or other weights with --cut"
NOTHING_COMPARED = (
    "nothing could be compared of gradients: the model is certain of its labels, so that rounding alone may change "
    "them as much as a fault; take other rows"
)
FLIPPED = 8
"""Another choice of experts changes some log-probs by at least this many times the rounding of the others."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Is a quantity that differs."""

    quantity: str
    text: str
    parameter: str | None = None  # the one that is furthest off, by its Hugging Face name

    def __str__(self) -> str:
        return f"{self.quantity}: {self.text}"


def problems(found: LayoutComparison, *, head: str, lengths: Sequence[int]) -> list[Problem]:
    """Returns the quantities that differ, in the order of a step. lengths: tokens of each sequence of the batch."""
    named, bounds = "log-probs" if head == "lm" else "values", found.bounds
    made: list[Problem | None] = [
        _tensors("initial weights", found.start, 0.0),
        _log_probs(named, found, bounds.log_probs, lengths),
        _number("loss", found.loss, found.expected_loss, found.loss_error, bounds.loss),
        _tensors("gradients", found.gradients, bounds.gradients),
        _number("gradient norm", found.grad_norm, found.expected_grad_norm, found.grad_norm_error, bounds.grad_norm),
        _tensors("weights after a step", found.weights, bounds.weights),
    ]
    return [problem for problem in made if problem is not None]


def clue(found: Sequence[Problem]) -> str | None:
    """Returns a hint on the cause from the first quantity that differs."""
    if not found:
        return None
    quantities = [problem.quantity for problem in found]
    first = quantities[0]
    if first == "initial weights":
        return "this layout starts from another model: look at how weights are loaded, or made where they are random"
    if first == "loss" and "gradients" in quantities:
        return "the model computes the same: look at the mask, the loss function, and what its sum is divided by"
    if first in ("log-probs", "values"):
        return "weights are the same and the forward pass is not: look at the first parameters below"
    if first == "loss":
        return "gradients are right and the loss that is reported is not: look at how it is summed over ranks"
    if first in ("gradients", "gradient norm"):
        return "the forward pass is right: look at the backward pass and at how gradients are summed over ranks"
    return "gradients are right: look at the optimizer"


@dataclasses.dataclass(frozen=True)
class Undecided:
    """Says why differences may be no fault."""

    why: str
    compared: bool  # whether some numbers that such a difference cannot touch are the same


def undecided(found: LayoutComparison, differ: Sequence[Problem]) -> Undecided | None:
    """Returns why the differences may be no fault; None if they are one, or there are none.

    Another choice of experts explains log-probs that differ only after undecided routers. It is no excuse for a loss or
    weights that differ while all log-probs are within their bound.
    """
    quantities = {problem.quantity for problem in differ}
    if not quantities or "initial weights" in quantities:
        return None
    if found.bounds.certain and quantities <= {"gradients", "gradient norm", "weights after a step"}:
        return Undecided(NOTHING_COMPARED, compared=False)
    decided, bound, labels = found.decided_log_probs, found.bounds.log_probs, found.decided_labels
    if decided is None or decided > bound:
        return None
    if found.log_probs <= bound:
        flipped = labels > 0 and found.log_probs > (FLIPPED * decided if decided else bound / 10)
        if not flipped or not quantities <= {"gradients", "gradient norm"}:
            return None
    if labels == 0:
        why = f"nothing could be compared: {UNDECIDED}, and all labels are after one; {OTHER_BATCH}"
        return Undecided(why, compared=False)
    return Undecided(f"{UNDECIDED}; the {labels} labels before these are the same: {OTHER_BATCH}", compared=True)


def _tensors(quantity: str, errors: TensorErrors, bound: float) -> Problem | None:
    if not (errors.over or errors.missing or errors.unexpected):
        return None
    parts = []
    if errors.over:
        beyond = f" (bound {bound:g})" if bound else ""
        parts.append(f"{errors.over} of {errors.compared} tensors are off{beyond}")
        if errors.factor is not None:
            parts.append(f"all of these are {errors.factor:.3g} times what they should be")
        parts += [str(off) for off in errors.worst if off.error > bound]
    for names, kind in ((errors.missing, "missing"), (errors.unexpected, "left over")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"{kind}: {names[0]}{more}")
    parameter = errors.worst[0].name if errors.over else [*errors.missing, *errors.unexpected][0]
    return Problem(quantity, "; ".join(parts), parameter)


def _number(quantity: str, actual: float, expected: float, error: float, bound: float) -> Problem | None:
    if error <= bound:
        return None
    ratio = actual / expected if expected else math.inf
    return Problem(quantity, f"{actual:.7g}, not {expected:.7g} ({ratio:.5g} times it; bound {bound:g})")


def _log_probs(name: str, found: LayoutComparison, bound: float, lengths: Sequence[int]) -> Problem | None:
    if found.log_probs <= bound:
        return None
    sequence, place = 0, found.log_probs_at
    while place >= lengths[sequence]:
        place, sequence = place - lengths[sequence], sequence + 1
    return Problem(
        name, f"off by up to {found.log_probs:.2g} (bound {bound:g}), at token {place} of sequence {sequence}"
    )
