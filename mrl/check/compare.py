"""Compares numbers of a layout with those of a reference, and gives the verdict.

The verdict is "the same", or the quantity that differs, its parameter, and its distance from the bound. Bounds have
their reasons here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

MAX_SHOWN = 3
"""Tensors that are named of each quantity, the worst first."""
SAME_FACTOR = 0.02
"""Relative error that may remain after division by a factor, if the factor is the only fault of a tensor."""
MARGIN = 32
"""An element's update is compared if its gradient is this many times its possible rounding. AdamW's first update is a
step of one size in the direction of each element's gradient. If that is rounding alone, so is the update."""


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Returns ||actual - expected|| / ||expected||, in fp64; 0 if both are zero, infinite if it is not a number."""
    difference = (actual.double() - expected.double()).norm().item()
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference == 0 else difference / max(expected.double().norm().item(), 1e-300)


def is_known(gradient: Tensor, norm: float) -> Tensor:
    """Returns for each element if its gradient is above fp32's rounding of the whole gradient; an exact 0 counts."""
    return (gradient == 0) | (gradient.abs() > 2**-24 * norm)


@dataclasses.dataclass(frozen=True)
class TensorMismatch:
    """Is a tensor that differs from the reference."""

    name: str  # in the model's files, or peft's
    error: float  # L2 of the difference, relative to that of the expected tensor
    factor: float | None = None  # where it is the expected tensor times this, within `SAME_FACTOR`

    def __str__(self) -> str:
        if math.isinf(self.error):
            return f"{self.name} is not finite"
        times = f", {self.factor:.3g} times what it should be" if self.factor is not None else ""
        return f"{self.name} is off by {self.error:.2g} of its size{times}"


@dataclasses.dataclass(frozen=True)
class TensorErrors:
    """Says how the tensors of one kind compare."""

    compared: int
    worst: Sequence[TensorMismatch]  # the `MAX_SHOWN` ones
    over: int  # how many are off by more than the bound
    factor: float | None = None  # the one factor of all that are over, where they have one
    missing: Sequence[str] = ()  # tensors that the reference has and the layout has not
    unexpected: Sequence[str] = ()  # the other way round

    @property
    def error(self) -> float:
        return self.worst[0].error if self.worst else 0.0


def tensor_errors(
    stream: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, Tensor],
    *,
    bound: float,
    error: Callable[[str, Tensor, Tensor], float] | None = None,
) -> TensorErrors:
    """Compares tensors as they come. expected: all that should come.

    error: returns that of a tensor by its name, the actual and the expected one. The default is `relative_l2`, and only
    with it are factors looked for.
    """
    waiting, found, unexpected = set(expected), [], []
    for name, tensor in stream:
        if name not in waiting:
            unexpected.append(name)
            continue
        waiting.remove(name)
        tensor, right = tensor.cpu(), expected[name]
        if right.shape != tensor.shape:
            unexpected.append(f"{name} of shape {list(tensor.shape)}, not {list(right.shape)}")
            continue
        of_tensor = relative_l2(tensor, right) if error is None else error(name, tensor, right)
        has_factor = error is None and of_tensor > bound
        found.append(TensorMismatch(name, of_tensor, factor_of(tensor, right) if has_factor else None))
    found.sort(key=lambda off: -off.error)
    over = [off for off in found if off.error > bound]
    return TensorErrors(
        len(found), found[:MAX_SHOWN], len(over), common_factor(over), sorted(waiting), sorted(unexpected)
    )


def factor_of(actual: Tensor, expected: Tensor) -> float | None:
    """Returns the factor from `expected` to `actual`, if nothing else differs."""
    a, b = actual.double(), expected.double()
    size = float((b * b).sum())
    if size == 0:
        return None
    factor = float((a * b).sum()) / size
    left = float((a - factor * b).norm())
    fits = math.isfinite(left) and factor != 0 and left <= SAME_FACTOR * abs(factor) * math.sqrt(size)
    return factor if fits else None


def common_factor(over: Sequence[TensorMismatch]) -> float | None:
    """Returns the common factor of some tensors, if they have one; of a few it may be chance."""
    factors = [off.factor for off in over]
    if len(factors) < 2 or None in factors:
        return None
    middle = sorted(f for f in factors if f is not None)[len(factors) // 2]
    same = all(f is not None and abs(f - middle) <= SAME_FACTOR * abs(middle) for f in factors)
    return middle if same else None


def is_sure(gradient: Tensor, *, grad_norm: float, rounding: float) -> Tensor:
    """Returns for each element if the direction of its update is known, so that rounding keeps its gradient's sign.

    rounding: its relative L2, at most. An exact 0 is known.
    """
    rms = gradient.double().norm() / math.sqrt(gradient.numel())
    return is_known(gradient, grad_norm) & ((gradient == 0) | (gradient.abs() > MARGIN * rounding * rms))


def update_error(
    before: Tensor, actual: Tensor, expected: Tensor, gradient: Tensor | None, *, grad_norm: float, rounding: float,
    dtype: torch.dtype,
) -> float:  # fmt: skip
    """Returns the relative L2 error of a weight's update, over its elements with a known gradient.

    gradient: the expected one, or None. rounding: the relative L2 error that it may have.

    dtype: of the weights; two right weights may differ by one unit in its last place.
    """
    update, gap = expected.double() - before.double(), (actual.double() - expected.double()).abs()
    if not torch.isfinite(gap).all():
        return math.inf
    # an epsilon of its size is at least a unit in the last place, and 1 % more where that is rounded itself
    gap = (gap - 1.01 * torch.finfo(dtype).eps * expected.double().abs()).clamp(min=0)
    if gradient is not None:
        sure = is_sure(gradient, grad_norm=grad_norm, rounding=rounding)
        update, gap = update * sure, gap * sure
    wrong = float(gap.norm())
    return 0.0 if wrong == 0 else wrong / max(float(update.norm()), 1e-300)


# -- how far two right computations of one step may be apart -----------------------------------------------------------

UNSURE = 0.02
"""Mean of 1 - p over labels, below which bounds of gradients grow."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Holds the errors that rounding may cause in right numbers."""

    loss: float  # relative where the loss is above 1, else absolute: it is a mean of log-probs
    grad_norm: float  # relative
    log_probs: float  # the largest difference
    gradients: float  # relative L2 of a tensor
    weights: float  # relative L2 of what a step makes of a tensor
    router: float  # by which a router's scores of two experts may change, relative to their size
    most: float  # up to which those of gradients and their norm grow; gradients of zeros are off by 1
    why: str
    certain: bool = False  # whether rounding alone may change gradients by more than `most`

    def given(self, log_probs: Tensor) -> Bounds:
        """Returns the bounds for a model with these log-probs [T] of labels, 0 at labels that do not train.

        The gradient of a label's log-prob is 1 - p, which fp32 rounds by 1e-7. The relative error is larger if a model
        is nearly certain. A bound above `most` would let faults pass, so gradients then decide nothing.
        """
        unsure = float((1 - log_probs[log_probs != 0].double().exp()).mean()) if (log_probs != 0).any() else 1.0
        times = max(1.0, UNSURE / max(unsure, 1e-6))
        return dataclasses.replace(
            self, gradients=min(times * self.gradients, self.most), grad_norm=min(times * self.grad_norm, self.most),
            certain=times * self.gradients > self.most,
        )  # fmt: skip

    def __str__(self) -> str:
        numbers = (
            f"loss {self.loss:g}, norm {self.grad_norm:g}, log-probs {self.log_probs:g} (absolute), "
            f"gradients {self.gradients:g}, updates {self.weights:g}"
        )
        return f"{numbers}; {self.why}"


# Measured on a CPU: the 30 layers of SmolLM2-135M with its own weights, 504 tokens.
# float32, pp2: loss 1.4e-7, norm 5.1e-5 (of 28 million squares in one sum), log-probs 2.5e-5, gradients 1.6e-5,
# updates 1.6e-6.
# bfloat16, dp1 and tp3: loss 1.5e-3, norm 7.4e-3, log-probs 0.39, gradients 0.19. A gradient that is half or twice what
# it should be is off by 0.5 or 1. An update is less than a unit in the last place of most weights: it shows little.
# Tiny models, two seeds, dp1, tp2, pp2, cp2, dp2: gradients 0.04 of llama and qwen3, 0.08 of them at 24 layers. Of
# qwen3_moe, deepseek_v3 and gpt_oss 0.27 to 0.69 and log-probs to 0.35, as most sequences have an undecided router,
# and log-probs change by that as by rounding: models with experts are compared in float32 (see run.py).
BOUNDS = {
    "float32": Bounds(
        loss=1e-5, grad_norm=1e-3, log_probs=5e-4, gradients=1e-4, weights=1e-3, router=1e-4,
        most=0.1, why="fp32 sums in another order gave a sixth of these at most in 30 layers",
    ),
    "bfloat16": Bounds(
        loss=1e-2, grad_norm=5e-2, log_probs=1.0, gradients=0.4, weights=0.5, router=0.05,
        most=0.45, why="bfloat16 keeps 3 digits of each number; small faults hide in that, which float32 finds",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LayoutComparison:
    """Holds the errors of a layout against the reference."""

    loss: float
    expected_loss: float
    grad_norm: float
    expected_grad_norm: float
    log_probs: float  # the largest difference
    log_probs_at: int  # the place [T] of it
    decided_log_probs: float | None  # the same of labels that no undecided router is before; None: all are
    decided_labels: int  # how many such labels there are
    start: TensorErrors  # weights before the step
    gradients: TensorErrors
    weights: TensorErrors  # what the step made of them
    weights_share: float  # of the elements with a gradient, those whose update could be compared
    bounds: Bounds

    @property
    def loss_error(self) -> float:
        """Returns the difference, relative to losses above 1."""
        return abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1.0)

    @property
    def grad_norm_error(self) -> float:
        return abs(self.grad_norm - self.expected_grad_norm) / max(self.expected_grad_norm, 1e-30)


# -- the verdict on a layout -------------------------------------------------------------------------------------------

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
