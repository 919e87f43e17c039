"""NVIDIA's apex by its names alone: what megatron-core takes of it, on tensors that have no memory.

FusedAdam keeps its state as apex's does: fp32 moments for each tensor, the count of updates for each group. Its kernels
are shapes and dtypes, and are counted.
"""

from __future__ import annotations

import collections
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cuda.cases import Case, Result

CALLS: collections.Counter[str] = collections.Counter()


def multi_tensor_applier(kernel: Any, overflow: Tensor, lists: Sequence[Sequence[Tensor]], *args: Any) -> Any:
    return kernel(2048 * 32, overflow, lists, *args)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], each: bool
) -> tuple[Tensor, Tensor]:
    CALLS["l2norm"] += 1
    return (torch.empty(1, device=overflow.device), torch.empty(len(lists[0]) if each else 0, device=overflow.device))


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    CALLS["scale"] += 1


def wgrad_gemm_accum_fp32(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Adds the gradient of a weight to its fp32 sum. rows [T, inputs], gradient [T, outputs], total [outputs, inputs]."""
    assert total.dtype == torch.float32 and rows.dtype == gradient.dtype == torch.bfloat16
    assert len(rows) == len(gradient) and total.shape == (gradient.shape[1], rows.shape[1])
    CALLS["wgrad"] += 1


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adam_w_mode: bool,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                CALLS["adam"] += 1
                assert parameter.grad.dtype == parameter.dtype == torch.float32
                for name in () if self.state[parameter] else ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][name] = torch.zeros_like(parameter)


MODULES = {
    "apex": (), "apex.optimizers": (FusedAdam,), "apex.multi_tensor_apply": (multi_tensor_applier,),
    "amp_C": (multi_tensor_l2norm, multi_tensor_scale), "fused_weight_gradient_mlp_cuda": (wgrad_gemm_accum_fp32,),
}  # fmt: skip


def boot() -> None:
    """Imports find `MODULES` in this process from now on."""
    for name, objects in MODULES.items():
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__file__, is_package=name == "apex")
        module.__dict__.update({each.__name__: each for each in objects})
        sys.modules[name] = module
    sys.modules["apex.optimizers"].FusedSGD = torch.optim.SGD  # type: ignore[attr-defined]


def update(case: Case) -> tuple[Result, dict[str, int]]:
    """Returns what an update takes, and how often each kernel was called for it."""
    from tests.cuda import run

    return run.run(case), dict(CALLS)
