"""Finds tokens that a router is undecided about.

Two right computations may send one to different experts, and give other numbers from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mrl.check import reference
from mrl.data.dataset import Example


def has_experts(raw: Mapping[str, Any]) -> bool:
    """Returns whether the model of a config.json routes tokens to experts."""
    counts = [value for name, value in raw.items() if name.endswith("experts") and type(value) is int]
    return any(count > 1 for count in counts)


class _Choices(TorchFunctionMode):
    """Notes narrow decisions of `torch.topk`: all routers of transformers choose by it, over [tokens, experts]."""

    def __init__(self, rounding: float) -> None:
        super().__init__()
        self.rounding = rounding
        self.narrow: Tensor | None = None  # [T], of any layer; None before the first choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores, count = args[0], args[1] if len(args) > 1 else (kwargs or {})["k"]
            if scores.ndim == 2 and count < scores.shape[1]:  # of three dimensions are the best experts within a group
                narrow_T = self._narrow(scores.detach().float(), count)
                self.narrow = narrow_T if self.narrow is None else self.narrow | narrow_T
        return found

    def _narrow(self, scores_TE: Tensor, count: int) -> Tensor:
        ordered_TE = scores_TE.sort(-1, descending=True).values
        last_T, next_T = ordered_TE[:, count - 1], ordered_TE[:, count]
        finite_TE = torch.where(scores_TE.isfinite(), scores_TE, 0.0)  # groups that are left out have -inf
        size_T = torch.maximum(last_T.abs(), finite_TE.std(-1))
        return next_T.isfinite() & (last_T - next_T <= self.rounding * size_T)


@torch.no_grad()
def undecided_tokens(
    model: torch.nn.Module, examples: Sequence[Example], *, head: str, rounding: float
) -> Tensor | None:  # fmt: skip
    """Returns for each token of the batch [T] whether its router, or an earlier one in its sequence, is undecided.

    Returns None for a model without routers, or without such a token.

    rounding: how far apart two right scores may be, relative to their size.
    """
    found = []
    for example in examples:
        with _Choices(rounding) as choices:
            reference.predict(model, example, head=head)
        if choices.narrow is None:
            return None
        found.append(choices.narrow.cummax(0).values)
    all_T = torch.cat(found).cpu()
    return all_T if all_T.any() else None
