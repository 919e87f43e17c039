"""Extends torch's AdamW: moments in bfloat16, and all of its state in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class RoundedAdamW(torch.optim.AdamW):
    """Runs torch's AdamW on fp32 parameters, and rounds each moment to its dtype after an update.

    An update uses the moments before they are rounded. With fp32 for both it is torch's to the bit.
    transformer-engine's FusedAdam rounds alike; torch's AdamW and apex's FusedAdam have no such moments. One parameter
    is updated after the other, with fp32 copies of its moments.
    """

    dtypes: Mapping[str, torch.dtype]
    """The dtypes of the moments exp_avg and exp_avg_sq."""

    @classmethod
    def from_adam(cls, adam: torch.optim.Optimizer, dtypes: Mapping[str, torch.dtype]) -> RoundedAdamW:
        """Returns one that updates the parameters of `adam`.

        They may be megatron's shards: views, which torch's constructor refuses.
        """
        made = cls([torch.nn.Parameter(torch.empty(0))])
        made.param_groups = adam.param_groups
        made.dtypes = dict(dtypes)
        return made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)

    def _update(self, group: Mapping[str, Any], main: Tensor, gradient: Tensor) -> None:
        state = self.state[main]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
        for name, dtype in self.dtypes.items():
            if name not in state:
                state[name] = torch.zeros_like(main, dtype=dtype)
        moments = {name: state[name].float() for name in self.dtypes}  # no copy if it is fp32
        beta1, beta2 = group["betas"]
        adamw(
            [main], [gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [state["step"]], foreach=False,
            fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for name, moment in moments.items():
            if moment is not state[name]:
                state[name].copy_(moment)


class HostAdamW(RoundedAdamW):
    """Runs AdamW on the host, with fp32 masters and moments there.

    Its parameters are megatron's shards on the device, with their gradients as `decoupled_grad`. For one after the
    other the gradient is copied to the host, and the new values back. The state belongs to the masters.
    """

    masters: Mapping[Tensor, Tensor]
    """The parameter's fp32 values, in host memory, by parameter."""

    @classmethod
    def from_adam(cls, adam: torch.optim.Optimizer, dtypes: Mapping[str, torch.dtype]) -> HostAdamW:
        made = super().from_adam(adam, dtypes)
        assert isinstance(made, HostAdamW)
        made.masters = {p: _on_host(p) for group in made.param_groups for p in group["params"]}
        return made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad
                if gradient is not None:
                    master = self.masters[parameter]
                    self._update(group, master, gradient.to(master.device, torch.float32))
                    parameter.copy_(master)


def _on_host(parameter: Tensor) -> Tensor:
    """Returns an fp32 copy, in memory that a GPU copies to and from directly."""
    copy = torch.empty(parameter.shape, dtype=torch.float32, device="cpu", pin_memory=parameter.is_cuda)
    return copy.copy_(parameter.detach())
