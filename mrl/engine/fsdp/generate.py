"""Greedy completions with transformers' key/value cache, in batches padded on the left.

Dimensions: `R` requests of a batch, `L` tokens of the longest prompt in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mrl.engine.base import Completion, GenerateRequest

REQUESTS_AT_ONCE = 64


@dataclasses.dataclass
class _Running:
    """One request being completed."""

    request: GenerateRequest
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    finished: bool = False

    @property
    def active(self) -> bool:
        return not self.finished and len(self.tokens) < self.request.max_new_tokens

    def add(self, token: int, log_prob: float) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.finished = token in self.request.stop_tokens


@torch.no_grad()
def generate(
    use: Callable[[Callable[[nn.Module], Tensor]], Tensor],
    requests: Sequence[GenerateRequest],
    *,
    device: torch.device,
    any_rank: Callable[[bool], bool],
) -> list[Completion]:
    """Completes `requests`. Every rank calls this together, with requests of its own or none.

    use: runs a function of the model where its weights are gathered. any_rank: whether the flag is set on any rank;
    a rank that is done keeps step with the others, because gathering weights takes all.
    """
    running = [_Running(request) for request in requests]
    at = 0
    while any_rank(at < len(running)):
        part = running[at : at + REQUESTS_AT_ONCE] or [_Running(GenerateRequest([0], 0))]
        at += REQUESTS_AT_ONCE
        _complete(use, part, device=device, any_rank=any_rank)
    return [Completion(r.tokens, r.log_probs, r.finished) for r in running]


def _complete(use, part: list[_Running], *, device: torch.device, any_rank: Callable[[bool], bool]) -> None:
    """Runs one batch to its end, token by token."""
    longest = max(len(r.request.tokens) for r in part)
    rows = [[0] * (longest - len(r.request.tokens)) + list(r.request.tokens) for r in part]
    masks = [[0] * (longest - len(r.request.tokens)) + [1] * len(r.request.tokens) for r in part]
    tokens, mask = torch.tensor(rows, device=device), torch.tensor(masks, device=device)
    cache: list[DynamicCache] = []
    while any_rank(any(r.active for r in part)):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]

        def forward(hf: nn.Module, tokens=tokens, positions=positions, mask=mask) -> Tensor:
            if not cache:
                cache.append(DynamicCache(config=hf.config))
            hidden = hf.model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache[0], use_cache=True
            ).last_hidden_state[:, -1]  # fmt: skip
            return torch.log_softmax((hidden @ hf.lm_head.weight.t()).float(), dim=-1)

        best = use(forward).max(dim=-1)
        for r, token, log_prob in zip(part, best.indices.tolist(), best.values.tolist(), strict=True):
            if r.active:
                r.add(token, log_prob)
        tokens = best.indices[:, None]
        mask = torch.cat([mask, mask.new_ones(len(part), 1)], dim=1)
