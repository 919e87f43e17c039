"""Which sampler a run has."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mrl.batch import make_batch
from mrl.config.ppo import PPOConfig
from mrl.engine.base import Completion, GenerateRequest
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
    config: PPOConfig, dispatch: WorkerDispatch, tokenizer: PreTrainedTokenizerBase, folder: str, directory: RunDirectory,
    console: Console,
) -> Sampler:  # fmt: skip
    """The sampler of `rollout.backend`, but for a replay, which samples nothing. folder: of the actor's model."""
    rollout = config.rollout
    if rollout.backend == "native":
        limits = {"cache_tokens": rollout.cache_tokens, "prefill_tokens": rollout.prefill_tokens}

        def generate(requests: list[GenerateRequest]) -> list[Completion]:
            return dispatch.generate("actor", requests, **limits, told=console.generated)

        return EngineSampler(generate, tokenizer)
    if rollout.backend == "vllm" and not rollout.server.urls:
        return VLLMSampler(
            rollout.server, path=folder, dtype=config.actor.model.dtype, temperature=rollout.temperature,
            max_length=config.max_length, world_size=dispatch.world_size, gpu=dispatch.device.type == "cuda",
        )  # fmt: skip
    return SERVERS[rollout.backend](
        rollout.server, is_main=dispatch.is_main, on_main=dispatch.on_main, max_length=config.max_length,
        weights_dir=weights_dir(rollout.server, str(directory.path)), probe=_probe(dispatch, tokenizer, config.max_length),
    )  # fmt: skip


def _probe(dispatch: WorkerDispatch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Probe:
    """What servers are asked about after every hand-over, to compare with the actor's own log-probs."""

    def log_probs(tokens: Sequence[int]) -> list[float]:
        batch = make_batch([list(tokens)], [[1.0] * len(tokens)])
        return dispatch.forward("actor", batch)["log_probs"].tolist()

    return Probe(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][: max_length - 1], log_probs)
