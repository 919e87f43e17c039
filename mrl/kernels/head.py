"""Computes an output layer's log-probs and their gradient by one operator in each direction, from logits.

mrl/engine/logprobs.py has the formulas, and the torch code for other tensors. A program has one row, or a part of one
in the gradient, and goes through its columns in a fixed order. So a row's numbers depend on no other row, and each run
gives the same bits. All is computed in fp32 and rounded once.

`draw` chooses tokens from logits: noise, argmax and log-probability in one pass. mrl/engine/sampling.py has the
formulas, and the torch code for other tensors. The operator rounds as that code on a GPU does, step by step, so it
chooses the same tokens. The log-sum-exp is summed in another order: log-probs differ by a few units in the last place
of fp32.

Dimensions: `C` tokens of a chunk, `S` sequences, `V` real columns of the vocabulary on this rank, `K` labels of a
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import operators

_LAUNCHERS = "mrl.kernels.head_launchers"


def _sums_like(z: Tensor, labels: Tensor, start: int, rule: list[float], entropy: bool, whole: bool) -> Tensor:
    count = labels.shape[1]
    return z.new_empty(2 + count if whole else 3 + 2 * count, z.shape[0], dtype=torch.float32)


head_sums = operators.operator(
    "head_sums(Tensor z, Tensor labels, int start, float[] rule, bool entropy, bool whole) -> Tensor",
    _LAUNCHERS,
    _sums_like,
)
"""Returns fp32 sums over the columns of z [C, V], one row of C numbers each.

The rows are the maximum, sum exp(z-m), sum exp(z-m)(z-m), z of each label, and whether each label is here. With
`whole`, for a vocabulary without other shards: the log-sum-exp, the entropy, and the log-prob of each label, NaN if it
is not here. Rows of the entropy are 0 (`whole`: meaningless) if `entropy` is not set. labels: [C, K] contiguous, global
ids; `start` is that of column 0. rule: scale, softcap or 0, temperature, applied in this order.
"""

head_gradient_ = operators.operator(
    "head_gradient_(Tensor(a!) z, Tensor labels, Tensor lse, Tensor grads, Tensor? entropy, Tensor? entropy_grad, "
    "int start, float[] rule) -> ()",
    _LAUNCHERS,
    lambda *_: None,
)
"""Writes the gradient of the logits z [C, V] over them. lse, entropy, entropy_grad: [C]. labels, grads: [C, K]
contiguous; grads are those of the log-probs. The rest: as of `head_sums`."""


draw = operators.operator(
    "draw(Tensor z, int start, Tensor? keys, Tensor? random, Tensor? temperature, Tensor? bound) -> Tensor",
    _LAUNCHERS,
    lambda z, *_: z.new_empty(4, z.shape[0], dtype=torch.float64),
)
"""Returns [4, S] fp64: the largest score, the global id of its column, the logit there, and the log-sum-exp.

The logit is z [S, V] over the temperature [S] fp32; the score is the logit plus the noise of keys [S] int64 in rows
where random [S] bool is set, and -inf where the logit is below bound [S] fp32. None: no temperature, no noise, noise in
all rows, no bound. start: the global id of column 0.
"""
