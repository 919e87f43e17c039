"""Sequences of unequal length, end to end: sums over each, and back.

Dimensions: `T` tokens, `S` sequences, `N` the most trained tokens of a sequence.

A sequence's sum is taken over its own slice, in its own order. So it is the same to the last bit whatever
sequences lie beside it, and on a GPU from run to run; scattered additions are neither.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def sum_per_sequence(values_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [S]: the sum over each sequence's tokens."""
    parts = values_T.split(lengths_S.tolist())
    return torch.stack([part.sum() for part in parts]) if parts else values_T.new_zeros(0)


def to_tokens(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [T]: each sequence's value at each of its tokens."""
    parts = [value.expand(length) for value, length in zip(values_S.unbind(), lengths_S.tolist(), strict=True)]
    return torch.cat(parts) if parts else values_S.new_zeros(0)


def last_trained_position(mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [S] int64: the index in [T] of each sequence's last token with a mask other than 0; -1 if it has none."""
    places_T = torch.arange(mask_T.numel(), device=mask_T.device).masked_fill(mask_T == 0, -1)
    parts = places_T.split(lengths_S.tolist())
    return torch.stack([part.max() for part in parts]) if parts else places_T.new_zeros(0)


def tokens_after_prompt(mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [S] int64: the number of each sequence's tokens from the first with a mask other than 0 on.

    Tokens with mask 0 after it count too.
    """
    parts = (mask_T != 0).long().split(lengths_S.tolist())
    return torch.stack([part.cummax(0).values.sum() for part in parts]) if parts else lengths_S.new_zeros(0)


def trained_columns(values_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [N, S]: the trained tokens of each sequence, one after another from the top; zeros below the last.

    Tokens between them (a prompt, an observation) are left out. So the row below a token has the policy's next choice.
    """
    trained_T = mask_T != 0
    counts = sum_per_sequence(trained_T.long(), lengths_S).tolist()
    return pad_sequence(values_T[trained_T].split(counts)) if counts else values_T.new_zeros(0, 0)


def from_trained_columns(columns_NS: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [T]: inverse of `trained_columns`; 0 where the mask is 0."""
    trained_T = mask_T != 0
    counts = sum_per_sequence(trained_T.long(), lengths_S).tolist()
    values_T = columns_NS.new_zeros(mask_T.numel())
    if counts:
        values_T[trained_T] = torch.cat([columns_NS[:count, s] for s, count in enumerate(counts)])
    return values_T
