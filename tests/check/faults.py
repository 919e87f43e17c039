"""Faults that trainers have had, put into mrl's own code; each must be found by the quantity and the parameter that point to it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mrl.check.compare import LayoutComparison, Problem, problems
from mrl.check.measure import LayoutWork, measure
from mrl.engine.megatron import optim
from mrl.weights import algebra
from mrl.weights.algebra import Shard, Span

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault as changes of a file under mrl/, and what `mrl check` says of it."""

    file: str
    changes: tuple[tuple[str, str], ...]  # a text that stands there once, and what stands there instead
    words: str  # of the command line
    row: str  # where it shows, by name; "" for the batch, before any layout runs
    quantity: str  # of the first problem there
    says: str  # a part of what is said of that row: the name of a parameter, where there is one
    same: tuple[str, ...] = ()  # rows where it does not show


PLANTED = {
    "wrong QKV interleave": Planted(
        "weights/algebra.py",
        (
            (
                "for group in range(groups) for source, start, count in of_group]",
                "for source, start, count in of_group for group in range(groups)]",
            ),
        ),
        "--layouts tp2", "tp2+sp", "log-probs", ".self_attn.",
    ),
    "missing gradient all-reduce": Planted(
        "engine/megatron/optim.py", (("    finalize_model_grads(list(chunks))\n", "    pass\n"),),
        "--layouts dp1,dp2", "dp2", "gradients", "_proj.weight", same=("dp1",),
    ),
    "mean instead of a sum": Planted(
        "algorithms/sft.py", (("(nll_T * mask_T).sum(), ctx", "(nll_T * mask_T).mean(), ctx"),),
        "--layouts dp1", "dp1", "loss", "what its sum is divided by",
    ),
    "shifted mask": Planted(
        "batch.py", (("loss_mask=flat([m[1:] for m in masks]", "loss_mask=flat([m[:-1] for m in masks]"),),
        "--layouts dp1", "", "loss mask", "1 earlier",
    ),
    "shared RNG of pipeline stages": Planted(
        "weights/random_weights.py",
        (
            (
                'f"{self.seed}:{name}"',
                '(f"{self.seed}:" + ".".join(str(self.__dict__.setdefault("seen", {}).setdefault(part, '
                'len(self.__dict__["seen"]))) if part.isdigit() else part for part in name.split(".")))',
            ),
        ),
        "--layouts dp1,pp2 model.init=random", "pp2", "initial weights", "model.layers.", same=("dp1",),
    ),
    "sharded parameter not loaded": Planted(
        "engine/megatron/weights.py",
        (
            (
                "                parameters[name].copy_(rule.load(read))",
                '                _ = "linear_fc2" in name and rule.rank or parameters[name].copy_(rule.load(read))',
            ),
        ),
        "--layouts tp2", "tp2+sp", "initial weights", "down_proj.weight",
    ),
}  # fmt: skip


# -- in a world of processes -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_interleave() -> Iterator[None]:
    """q, k and v one after the other."""
    right = algebra.KINDS["qkv"]

    def wrong(shapes: Any, shard: Shard) -> list[Span]:
        whole = right(shapes, dataclasses.replace(shard, rank=0, degree=1))
        return sorted(whole, key=lambda span: span.source)

    with mock.patch.dict(algebra.KINDS, qkv=wrong):
        yield


def without_all_reduce() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(optim, "finalize_model_grads", lambda chunks: None)


def other_choice() -> contextlib.AbstractContextManager[Any]:
    """Of experts that score alike the first ones are chosen, as rounding may have it in another layout. It is no fault."""
    topk = torch.topk

    def first_of_equals(scores: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tilt = -1e-6 * torch.arange(scores.shape[-1], device=scores.device)
        chosen = topk(scores.detach() + tilt, *args, **kwargs).indices
        return scores.gather(-1, chosen), chosen

    return mock.patch.object(torch, "topk", first_of_equals)


PATCHES: dict[str, Patch] = {
    "another choice of experts": other_choice,
    "none": contextlib.nullcontext,
    "wrong QKV interleave": without_interleave,
    "missing gradient all-reduce": without_all_reduce,
}


def measured(work: LayoutWork, fault: str) -> tuple[LayoutComparison, list[Problem]] | None:
    """What a layout gives with a fault in its code, and what is said of it."""
    with PATCHES[fault]():
        found = measure(work)
    if found is None:
        return None
    return found, problems(found, head=work.config.head, lengths=work.batch.lengths.tolist())
