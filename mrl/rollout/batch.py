"""From trajectories to the batch that engines train on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.batch import Batch, make_batch
from mrl.rollout.base import Trajectory


def trajectories_to_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """A global batch of the trajectories in their order; what trains, and what is counted, is what the policy sampled.

    token_fields: "rollout_log_probs" [T] float32, of the sampler, at the token that is sampled there; 0 where none is.
    """
    log_probs = [x for t in trajectories for x in t.log_probs[1:]]
    return make_batch(
        [t.tokens for t in trajectories],
        [t.mask for t in trajectories],
        token_fields={"rollout_log_probs": torch.tensor(log_probs, dtype=torch.float32)},
    )
