"""From losses of tokens to the loss of a mini-batch: a weight for each token, and the denominator of the sum.

Dimensions: `T` tokens of a micro-batch, `S` sequences. With the mask `m`, the loss `l` of each token and, over the
whole global mini-batch, `M` the sum of the mask and `n` the number of sequences with any of it:

    token_mean      sum m l / M                                       PPO, DAPO (Yu 2025, eq. 8)
    sequence_mean   1/n sum_i (sum_t m l / sum_t m)                   GRPO (Shao 2024, eq. 3), GSPO (Zheng 2025, eq. 5)
    fixed_length    1/n sum_i (sum_t m l / L)                         Dr. GRPO (Liu 2025, section 3.2): no length bias

DAPO's paper takes the token mean of each prompt's group and then the mean of those; its code, and this, one over all
tokens.

Each is `sum w l / denominator` with weights that depend only on the token's own sequence. A micro-batch holds whole
sequences, so loss and gradient do not depend on how the mini-batch is split (docs/loss.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mrl.algorithms.ragged import sum_per_sequence, to_tokens

DENOMINATORS: Mapping[str, str] = {"token_mean": "tokens", "sequence_mean": "sequences", "fixed_length": "sequences"}
"""`algorithm.aggregation` -> which of `Batch.denominators` its sum is divided by."""


def token_weights(aggregation: str, mask_T: Tensor, lengths_S: Tensor, *, fixed_length: int | None = None) -> Tensor:
    """Returns [T]: the weight of each token's loss in the sum, 0 outside the mask.

    fixed_length: `L` above, the longest response that may be sampled; read by the aggregation of its name alone.
    """
    if aggregation == "token_mean":
        return mask_T
    if aggregation == "sequence_mean":
        totals_T = to_tokens(sum_per_sequence(mask_T, lengths_S), lengths_S)
        return mask_T / totals_T.masked_fill(mask_T == 0, 1.0)
    assert aggregation == "fixed_length", f"aggregation {aggregation!r} is none of {sorted(DENOMINATORS)}"
    assert fixed_length is not None and fixed_length > 0, f"fixed_length is {fixed_length}, not a number of tokens"
    return mask_T / fixed_length
