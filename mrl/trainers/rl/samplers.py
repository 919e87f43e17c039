"""The sampler of a run, by `rollout.backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.batch import make_batch
from mrl.config.ppo import PPOConfig
from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.kept import KeptSequences
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Sampler
from mrl.rollout.native import EngineSampler
from mrl.rollout.servers import Probe
from mrl.rollout.sglang import SGLangServerSampler
from mrl.rollout.vllm import VLLMServerSampler
from mrl.rollout.vllm_local import VLLMSampler
from mrl.rollout.weights import weights_dir
from mrl.trainers.console import Console
from mrl.trainers.run_directory import RunDirectory

SERVERS = {"vllm": VLLMServerSampler, "sglang": SGLangServerSampler}
PROBE_TEXT = "The quick brown fox jumps over the lazy dog: 12 + 30 = 42."


def make_sampler(
    config: PPOConfig,
    dispatch: WorkerDispatch,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    directory: RunDirectory,
    console: Console,
) -> Sampler:
    """Returns the sampler of `rollout.backend`, but for a replay, which samples nothing. folder: of the actor's
    model."""
    rollout = config.rollout
    if rollout.backend == "native":
        # Half of the cache for conversations between their turns, but for what the longest sequence needs.
        kept_tokens = min(rollout.cache_tokens // 2, rollout.cache_tokens - config.max_length)

        def generate(requests: list[GenerateRequest], **kept: KeptSequences) -> list[Completion]:
            limits: dict[str, Any] = {"cache_tokens": rollout.cache_tokens - (kept_tokens if kept else 0)}
            limits |= {"prefill_tokens": rollout.prefill_tokens, "progress": console.generated}
            return dispatch.generate("actor", requests, **limits, **kept)

        return EngineSampler(generate, tokenizer, kept_tokens=kept_tokens)
    if rollout.backend == "vllm" and not rollout.server.urls:
        return VLLMSampler(
            rollout.server, path=folder, dtype=config.actor.model.dtype, temperature=rollout.temperature,
            max_length=config.max_length, device=dispatch.device,
        )  # fmt: skip
    return SERVERS[rollout.backend](
        rollout.server,
        is_main=dispatch.is_main,
        on_main=dispatch.on_main,
        max_length=config.max_length,
        weights_dir=weights_dir(rollout.server, str(directory.path)),
        probe=_probe(dispatch, tokenizer, config.max_length),
    )


def _probe(dispatch: WorkerDispatch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Probe:
    """Returns the text that servers are asked about after every hand-over, to compare with the actor's own
    log-probs."""

    def log_probs(tokens: Sequence[int]) -> list[float]:
        batch = make_batch([list(tokens)], [[1.0] * len(tokens)])
        return dispatch.forward("actor", batch)["log_probs"].tolist()

    return Probe(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][: max_length - 1], log_probs)
