"""Code that waits for a GPU in every way that fake.py counts."""

from __future__ import annotations

from typing import Any

import torch

from tests.cuda import fake


class _Given(fake.Given):
    def selected(self, mask: torch.Tensor) -> int:
        return 1

    def numbers(self, tensor: torch.Tensor, function: str) -> list[int]:
        return [0]


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * grad.sum().item()


def count() -> dict[str, Any]:
    """Returns what was counted, by kind, in a forward and a backward pass, and what mixed devices say."""
    with fake.Fake(_Given()) as watched:
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = _ReadsInBackward.apply(x)
        y.detach().sum().item()
        y.detach().cpu()
        y.detach()[:1].tolist()
        torch.cuda.synchronize()
        torch.ones(4).to("cuda")
        torch.ones(4).to("cuda", non_blocking=True)
        torch.ones(4).cuda()
        torch.ones(4).cuda(non_blocking=True)
        torch.tensor([1.0, 2.0], device="cuda")
        torch.as_tensor(torch.ones(4, device="cuda"), device="cuda")
        here, there = torch.ones(4), torch.ones(4, device="cuda")
        here.copy_(there)
        there.copy_(here)
        there.copy_(here, non_blocking=True)
        there.copy_(there)
        y.detach().masked_select(y.detach() > 0)
        bool(y.detach()[0] > 0)
        forward = _kinds(watched)
        y.sum().backward()
        backward = _kinds(watched)
        try:
            x.detach() + torch.ones(4)
            mixed = ""
        except Exception as error:
            mixed = str(error).split(",")[0]
    return {"forward": forward, "backward": backward, "mixed": mixed}


def _kinds(watched: fake.Fake) -> dict[str, int]:
    found = {line.split()[-1]: n for line, n in watched.syncs.items()}
    watched.syncs.clear()
    return found
