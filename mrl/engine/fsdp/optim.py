"""AdamW over sharded parameters: groups, the global gradient norm, clipping, state that checkpoints can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl.config.schema import OptimizerConfig
from mrl.engine.base import GradNorm
from mrl.engine.trained_state import UpdateSettings, clone_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Runs torch's AdamW on this rank's shards. Its state exists from the start, so a checkpoint can be read into it.

    shards: the ranks that hold one copy of the parameters between them, each a part.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, shards: dist.ProcessGroup
    ) -> None:
        self.parameters, self.config, self.shards = dict(parameters), config, shards
        # biases of experts that are stacked have two dimensions, and are biases
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, p in self.parameters.items():
            if p.ndim >= 2 and not name.endswith("bias"):
                decayed.append(p)
            else:
                others.append(p)
        groups = [{"params": decayed, "decays": True}, {"params": others, "decays": False}]
        self.adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, fused=True)
        # torch makes the state at the first step, too late to read a checkpoint into it. A fused AdamW needs `step` on
        # the parameter's device (torch 2.13, optim/adam.py).
        for p in self.parameters.values():
            self.adamw.state[p] = {"step": torch.zeros((), device=p.device)} | {m: torch.zeros_like(p) for m in MOMENTS}

    @property
    def updates(self) -> int:
        """Updates made, which Adam's bias correction counts; skipped steps are not among them."""
        return int(next(iter(self.adamw.state.values()))["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self.adamw.state.values():
            state["step"].fill_(count)

    def moments(self) -> dict[str, Tensor]:
        """Returns Adam's running averages as sharded tensors, named `exp_avg.PARAMETER` and `exp_avg_sq.PARAMETER`."""
        return {f"{m}.{name}": self.adamw.state[p][m] for name, p in self.parameters.items() for m in MOMENTS}

    def gradients(self) -> list[Tensor | None]:
        """Returns copies of this rank's accumulated gradients, in host memory; None of a parameter that has none."""
        return [None if p.grad is None else clone_tensors([p.grad.to_local()])[0] for p in self.parameters.values()]

    def set_gradients(self, gradients: Sequence[Tensor | None] | None) -> None:
        """Restores the result of `gradients`; None for none at all."""
        copies = [None] * len(self.parameters) if gradients is None else gradients
        for p, copied in zip(self.parameters.values(), copies, strict=True):
            p.grad = None if copied is None else torch.zeros_like(p)
            if copied is not None:
                p.grad.to_local().copy_(copied)

    def step(self, update: UpdateSettings) -> GradNorm:
        """Clips and updates. If the norm is not finite, nothing is updated on any rank."""
        shards = [p.grad.to_local() for p in self.parameters.values() if p.grad is not None]
        norm = global_norm(shards, self.shards)
        if not math.isfinite(norm):
            return GradNorm(norm, skipped=f"the gradient norm is {norm}")
        limit = update.clip_grad
        if limit and norm > limit:
            torch._foreach_mul_(shards, limit / (norm + 1e-6))  # 1e-6 as in torch's clip_grad_norm_
        for group in self.adamw.param_groups:
            decay = update.weight_decay if group["decays"] else 0.0
            group.update(lr=update.lr, betas=update.betas, eps=update.eps, weight_decay=decay)
        self.adamw.step()
        return GradNorm(norm)


def global_norm(shards: list[Tensor], group: dist.ProcessGroup) -> float:
    """Returns the L2 norm of the shards of all ranks of `group`, whose squares are added in fp64."""
    device = shards[0].device if shards else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if shards:
        squares += torch.stack(torch._foreach_norm(shards)).double().square().sum()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().item()
