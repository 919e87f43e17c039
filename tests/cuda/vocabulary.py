"""Counts operators and memory of the output layer, forward and backward, on CUDA tensors without memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.found[name] += name not in VIEWS
        return func(*args, **(kwargs or {}))


def head(tokens: int, columns: int, dtype: str) -> Found:
    with fake.Fake() as run:
        of = getattr(torch, dtype)
        hidden, weight = (torch.empty(n, WIDTH, dtype=of, device="cuda").requires_grad_() for n in (tokens, columns))
        labels = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        before = run.memory.alive
        with _Operators() as operators:
            log_probs, _ = log_probs_from_hidden(hidden, weight, labels, shard=VocabShard(columns), entropy="detached")
            log_probs.sum().backward()
        size = of.itemsize
        chunk = min(tokens, 2**29 // size // columns)
        gradients = tokens * WIDTH * size + columns * WIDTH * (4 if size == 4 else 4 + size)
        return Found(
            Counter(operators.found), -(-tokens // chunk), chunk * columns * size, gradients, run.memory.peak - before
        )
