"""The gated delta rule over sequences end to end: how many operations a GPU's host starts for it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.ops.delta_rule import CHUNK, Chunks, chunked_rule, unit


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(lengths):
    """Those of a forward and a backward pass, views too."""
    total, heads, sharing = sum(lengths), 2, 2
    query, key = (unit(torch.randn(total, heads, 8)).requires_grad_() for _ in range(2))
    value = torch.randn(total, heads, sharing, 12, requires_grad=True)
    decay, beta = ((sign * torch.rand(total, heads, sharing)).requires_grad_() for sign in (-1, 1))
    chunks = Chunks.of(lengths, torch.device("cpu"))
    with _Operations() as found:
        out, _ = chunked_rule(query, key, value, decay, beta, chunks)
        out.sum().backward()
    return found.count


def test_operations_grow_with_the_longest_sequence_alone():
    four, eight = operations([4 * CHUNK]), operations([8 * CHUNK])
    assert operations([4 * CHUNK] * 7) <= four + 10
    assert operations([4 * CHUNK, 1, CHUNK + 6]) <= four + 20
    assert eight - four <= 4 * 70
    assert four <= 500
