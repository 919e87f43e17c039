"""Counts operators and memory of the output layer, forward and backward, on CUDA tensors without memory."""

from __future__ import annotations

import dataclasses

import torch

from tests.cuda import fake  # before mrl: fake.py says what torch is here

from mrl.engine.logprobs import VocabShard, log_probs_from_hidden  # isort: skip

VIEWS = {"t", "slice", "detach", "unsqueeze", "select", "view", "expand", "transpose", "empty_like", "empty", "as_strided",
         "new_empty", "_unsafe_view", "squeeze", "alias", "device", "promote_types"}  # fmt: skip
WIDTH = 512


@dataclasses.dataclass(frozen=True)
class Found:
    operators: dict[str, int]
    chunks: int
    logits: int  # bytes of a chunk
    gradients: int  # bytes, those of the weight in fp32 and in its own dtype
    peak: int  # bytes above the arguments


def head(tokens: int, columns: int, dtype: str) -> Found:
    with fake.Fake() as run:
        of = getattr(torch, dtype)
        hidden, weight = (torch.empty(n, WIDTH, dtype=of, device="cuda").requires_grad_() for n in (tokens, columns))
        labels = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        before = run.memory.alive
        run.order.calls.clear()
        log_probs, _ = log_probs_from_hidden(hidden, weight, labels, shard=VocabShard(columns), entropy="detached")
        log_probs.sum().backward()
        operators = {name: n for name, n in run.order.calls.items() if name not in VIEWS}
        size = of.itemsize
        chunk = min(tokens, 2**29 // size // columns)
        gradients = tokens * WIDTH * size + columns * WIDTH * (4 if size == 4 else 4 + size)
        return Found(operators, -(-tokens // chunk), chunk * columns * size, gradients, run.memory.peak - before)
