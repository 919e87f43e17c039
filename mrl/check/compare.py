"""Compares numbers of a layout with those of a reference: how far each tensor is off, by its name."""

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
