"""The losses of `mrl dpo` by `loss.name`, as plain data: the keys of `loss` that each reads, with its numbers.

mrl/algorithms/preference.py has the equations and papers. The table is plain data, so that names are known without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping

# A key that a row has is read by that loss, and the number is its value where the config has null. beta of dpo: TRL,
# trl/trainer/dpo_config.py, beta; ipo and kto have the same there. simpo: ms-swift's defaults, within what its paper
# tries. orpo: lambda 0.1 as in TRL, orpo_config.py, and the SFT term of weight 1 that its equation has.
ROWS: Mapping[str, Mapping[str, float | bool]] = {
    "dpo": dict(beta=0.1, label_smoothing=0.0, reference_free=False, length_normalized=False, sft_weight=0.0),
    "ipo": dict(beta=0.1, length_normalized=False, sft_weight=0.0),
    "kto": dict(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, sft_weight=0.0),
    "orpo": dict(beta=0.1, sft_weight=1.0),
    "simpo": dict(beta=2.0, gamma=1.0, sft_weight=0.0),
}

LOSSES = tuple(ROWS)
"""Names that `loss.name` takes."""

NO_REFERENCE = ("orpo", "simpo")
"""Losses of the policy alone; so is dpo where it is reference-free."""

SINGLE_ROW_LOSSES = ("kto",)
"""Losses of single answers, each good or bad; of a pair they take both answers apart."""
