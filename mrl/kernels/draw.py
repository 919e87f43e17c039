"""Chooses tokens by one operator: noise, argmax and log-probability in one pass over the logits.

mrl/engine/sampling.py has the formulas, and the torch code for other tensors. The operator rounds as that code on a
GPU does, step by step, so it chooses the same tokens. The log-sum-exp is summed in another order: log-probs differ by a
few units in the last place of fp32. A program has one row and goes through it in a fixed order, so a row's token and
log-prob depend on no other row.

Dimensions: `S` sequences, `V` real columns of the vocabulary on this rank.
"""

from __future__ import annotations

import torch

from mrl.kernels import operators

draw = operators.operator(
    "draw(Tensor z, int start, Tensor? keys, Tensor? random, Tensor? temperature, Tensor? bound) -> Tensor",
    "mrl.kernels.draw_launchers",
    lambda z, *_: z.new_empty(4, z.shape[0], dtype=torch.float64),
)
"""Returns [4, S] fp64: the largest score, the global id of its column, the logit there, and the log-sum-exp.

The logit is z [S, V] over the temperature [S] fp32; the score is the logit plus the noise of keys [S] int64 in rows
where random [S] bool is set, and -inf where the logit is below bound [S] fp32. None: no temperature, no noise, noise in
all rows, no bound. start: the global id of column 0.
"""
