"""The algorithms by `algorithm.name`: the parts of each, and their numbers.

A row holds what differs from the defaults of `mrl.algorithms.recipes.Recipe`, where the parts are explained. The table
is plain data, so that names are known without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Each number's source stands beside it: a paper, or a trainer with the file in which it was read; docs/algorithms.md
# has the list. Those that no row sets (clips, gamma, lambda, the value's clip) are of openai/lm-human-preferences,
# lm_human_preferences/train_policy.py, PpoHParams. No row has a dual clip: no paper below has one, and it is off in TRL
# (`delta`) and OpenRLHF (`--actor.dual_clip`).
ROWS: Mapping[str, Mapping[str, Any]] = {
    # Schulman 2017; for language models Ziegler 2019, Ouyang 2022 (appendix C.4: the coefficient; KL in the reward).
    "ppo": dict(advantage="gae", whiten=True, kl_in="reward", kl_estimator="k1", kl_coef=0.02),
    # Shao 2024, section 4.2: the KL in the loss with coefficient 0.04.
    "grpo": dict(advantage="grpo", aggregation="sequence_mean", kl_in="loss", kl_estimator="k3", kl_coef=0.04),
    # Liu 2025: neither std nor length in the denominators, no KL.
    "dr_grpo": dict(advantage="group_mean", aggregation="fixed_length"),
    # Ahmadian 2024: REINFORCE on whole sequences. Of the first update after a rollout the clipped surrogate has the
    # same gradient; in later ones it bounds how far a rollout that is no longer the policy's own can lead. The
    # coefficient: TRL, trl/trainer/rloo_config.py, beta.
    "rloo": dict(advantage="rloo", aggregation="fixed_length", kl_in="reward", kl_estimator="k1", kl_coef=0.05),
    # Hu 2025: returns with the KL in the reward, whitened over the global batch, PPO's clip. The coefficient: the
    # authors' OpenRLHF, openrlhf/cli/train_ppo_ray.py, --algo.kl.init_coef.
    "reinforce_pp": dict(advantage="returns", whiten=True, kl_in="reward", kl_estimator="k1", kl_coef=0.01),
    # Hu 2025, with baseline: the group's mean, then the global batch; the KL in the loss, by k2. The coefficient:
    # OpenRLHF, examples/scripts/train_reinforce_baseline_hybrid_engine.sh.
    "reinforce_pp_baseline": dict(advantage="group_mean", whiten=True, kl_in="loss", kl_estimator="k2", kl_coef=1e-5),
    # Li 2023: REINFORCE on whole sequences against the greedy answer; the clip as for rloo. Discount and coefficient:
    # the authors' step3_rlhf_finetuning/training_scripts/llama2/run_llama2_7b.sh (liziniu/ReMax).
    "remax": dict(
        advantage="remax", aggregation="fixed_length", gamma=0.99, kl_in="reward", kl_estimator="k1", kl_coef=0.05
    ),
    # Yu 2025, section 4.1: clip-higher, token mean, dynamic sampling, overlong punishment (4096 of 20480 tokens), no
    # KL.
    "dapo": dict(advantage="grpo", clip_low=0.2, clip_high=0.28, dynamic_sampling=True, overlong_fraction=0.2),
    # Zheng 2025, section 5.1: ratios of whole sequences stay far closer to 1.
    "gspo": dict(advantage="grpo", ratio="sequence", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    # MiniMax 2025, eq. 4-5: no lower bound, and no number for the upper one. Weights up to 5: Khatri 2025, and TRL,
    # trl/trainer/grpo_config.py, epsilon_high for cispo.
    "cispo": dict(advantage="grpo", objective="cispo", clip_low=1.0, clip_high=4.0),
    # On-policy distillation: the reward of a sampled token is minus its reverse KL to the teacher, log p - log q, and
    # none answers for later ones (discount 0). Agarwal 2023 (GKD, on samples of the student alone); as a policy
    # gradient Lu 2025, "On-Policy Distillation" (Thinking Machines Lab): kl_penalty_coef and kl_discount_factor of
    # tinker-cookbook, tinker_cookbook/recipes/distillation/on_policy_distillation.py.
    "opd": dict(advantage="returns", gamma=0.0, kl_in="reward", kl_estimator="k1", kl_coef=1.0),
}

OPD_NAMES = ("opd",)
"""Algorithms whose reward is the distance to a teacher, which is the reference: they need no other reward."""

ALGORITHMS = tuple(ROWS)
"""Names that `algorithm.name` takes."""
