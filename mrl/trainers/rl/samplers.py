"""Which sampler a run has."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import PPOConfig
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Sampler
from mrl.rollout.native import EngineSampler
from mrl.trainers.run_directory import RunDirectory


def make_sampler(
    config: PPOConfig,
    dispatch: WorkerDispatch,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    directory: RunDirectory,
) -> Sampler:
    """The sampler of `rollout.backend`, but for a replay, which samples nothing. folder: of the actor's model."""
    rollout = config.rollout
    limits = {"cache_tokens": rollout.cache_tokens, "prefill_tokens": rollout.prefill_tokens}
    return EngineSampler(lambda requests: dispatch.generate("actor", requests, **limits), tokenizer)
