"""The sampler of `rollout.backend`, and how it gets the actor's weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.algorithms.recipes import configured_recipe
from mrl.batch import make_batch
from mrl.config.load import to_dict
from mrl.config.ppo import PPOConfig, RolloutConfig
from mrl.config.roles import describe_sampling
from mrl.config.schema import LoraConfig
from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.collective import OnMain, call_here
from mrl.engine.kept import KeptSequences
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.adapters import AdapterTraining
from mrl.rollout.base import Sampler, SharedRollouts, TrajectorySource
from mrl.rollout.fleet import Probe
from mrl.rollout.handover import weights_dir
from mrl.rollout.native import EngineSampler
from mrl.rollout.ranks import RankSampler
from mrl.rollout.recorded import KeptRollouts, RecordedRollouts
from mrl.rollout.rollouts import Rollouts
from mrl.rollout.servers import ServerSampler
from mrl.rollout.sglang import SGLangServerSampler
from mrl.rollout.stops import EndTokens
from mrl.rollout.vllm import VLLMServerSampler
from mrl.rollout.vllm_local import VLLMSampler
from mrl.trainers.common import say_all
from mrl.trainers.trainer import Trainer
from mrl.weights.hf_config import read_hf_config, vocab_size_of

SERVERS = {"vllm": VLLMServerSampler, "sglang": SGLangServerSampler, "native": RankSampler}
PROBE_TEXT = "The quick brown fox jumps over the lazy dog: 12 + 30 = 42."


def make_sampler(
    rollout: RolloutConfig,
    dispatch: WorkerDispatch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: str,
    dtype: str,
    max_length: int,
    output_dir: str | os.PathLike[str],
    progress: Callable[[int, int], None],
    lora: LoraConfig | None = None,
    ahead: int = 0,
    group: str = "",
    say: Callable[[str], None] = lambda line: None,
    ranks_url: str = "",
) -> Sampler:
    """Returns the sampler of `rollout.backend`, but for a replay, which samples nothing.

    folder, dtype, lora: of the actor's model. max_length: tokens of the longest sequence. output_dir: where weights for
    servers lie, if rollout.server names no folder. progress: as of `BaseEngine.generate`. ahead, say: as of
    `Fleet`. group: a folder of its own for weights. ranks_url: of the sampling ranks, with rollout.ranks.
    """
    if rollout.backend == "native" and not rollout.ranks:
        # Half of the cache for conversations between their turns, but for what the longest sequence needs.
        kept_tokens = min(rollout.cache_limit // 2, rollout.cache_limit - max_length)

        def generate(requests: list[GenerateRequest], **kept: KeptSequences) -> list[Completion]:
            limits: dict[str, Any] = {"cache_tokens": rollout.cache_limit - (kept_tokens if kept else 0)}
            limits |= {"prefill_tokens": rollout.prefill_tokens, "progress": progress}
            if rollout.cuda_graphs:  # an option of the Megatron engine alone
                limits["cuda_graphs"] = True
            return dispatch.generate("actor", requests, **limits, **kept)

        return EngineSampler(generate, tokenizer, kept_tokens=kept_tokens)
    if rollout.vllm_inside:
        return VLLMSampler(
            rollout.server, path=folder, dtype=dtype, temperature=rollout.temperature, max_length=max_length,
            device=dispatch.device,
        )  # fmt: skip
    server = rollout.server
    if rollout.ranks:
        server = dataclasses.replace(server, urls=(ranks_url,), handover="disk", concurrency=1)
    return SERVERS[rollout.backend](
        server,
        is_main=dispatch.is_main,
        on_main=dispatch.on_main,
        max_length=max_length,
        weights_dir=str(pathlib.Path(weights_dir(server, str(output_dir)), group)),
        probe=_probe(dispatch, tokenizer, max_length),
        device=dispatch.device,
        adapted=AdapterTraining(folder, lora) if lora is not None and rollout.server.lora == "adapter" else None,
        ahead=ahead,
        say=say,
        vocab_size=vocab_size_of(read_hf_config(folder)),
    )


class SyncedSampler:
    """Syncs the actor's weights to `sampler` and wakes it inside `with`; puts it to sleep after.

    sampler: None if nothing is sampled. shares: whether it samples on devices of the roles, which are then offloaded
    for one beside the actor's own engine.
    """

    def __init__(self, sampler: Sampler | None, dispatch: WorkerDispatch, *, shares: bool = True) -> None:
        self.sampler, self._dispatch = sampler, dispatch
        self._beside = sampler is not None and not sampler.exact
        self._offloads = self._beside and shares
        self._has_step: int | None = None
        self._seconds = 0.0

    @contextlib.contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        sampler = self.sampler
        if sampler is None:
            yield
            return
        try:
            self.sync(step)
            yield
        finally:
            sampler.sleep()

    def sync(self, step: int) -> None:
        """Gives the sampler the weights after `step` if it has others, and wakes it. Collective."""
        sampler, dispatch, began_s = self.sampler, self._dispatch, time.perf_counter()
        assert sampler is not None, "nothing samples"
        if self._offloads:
            dispatch.offload_all()
        if self._has_step != step or sampler.forgets:
            if sampler.takes_adapters:
                sampler.update_weights(dispatch.adapter_weights("actor"))
            else:
                sampler.update_weights(dispatch.hf_weights("actor", everywhere=sampler.everywhere))
            if self._offloads:
                dispatch.offload_all()
        sampler.wake()
        self._has_step = step
        self._seconds += time.perf_counter() - began_s

    def take_seconds(self) -> float | None:
        """Returns how long hand-overs took since it was last asked, also those before evaluations; None for a sampler
        that reads the actor's own weights."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds if self._beside else None


def open_rollouts(trainer: Trainer, ranks_url: str) -> tuple[TrajectorySource, list[SyncedSampler]]:
    """Returns the source of trajectories, and the sampler behind it; several if groups of servers take turns. They end
    with the trainer. ranks_url: of the sampling ranks, with rollout.ranks."""
    config, dispatch, console = trainer.config, trainer.dispatch, trainer.console
    tokenizer, ends = trainer.tokenizer, trainer.ends
    console.doing("starting the sampler")
    say_all(console, ends.notes(tokenizer, "completions end there, too, and the export names it"))
    if config.rollout.backend == "recorded":
        corrects = configured_recipe(config.algorithm).correction != "none"
        recorded = RecordedRollouts(config.rollout, on_main=dispatch.on_main, corrects=corrects)
        return recorded, [SyncedSampler(None, dispatch)]
    model = config.actor.model
    folder = dispatch.engines["actor"].config.model.path
    level = config.rollout.async_level
    rollouts_by_group = groups_of_servers(config.rollout)
    samplers = []
    sampling = describe_sampling(config, dispatch.world_size, gpu=dispatch.device.type == "cuda")
    if sampling is not None:
        console.say(sampling)  # first: vLLM may take a minute to start, and servers may not answer
    for number, rollout in enumerate(rollouts_by_group):
        sampler = make_sampler(
            rollout, dispatch, tokenizer, folder=folder, dtype=model.dtype, max_length=config.max_length,
            output_dir=trainer.directory.path, progress=console.generated, lora=model.lora, say=console.say,
            ranks_url=ranks_url, ahead=level // len(rollouts_by_group), group=f"group_{number}" if number else "",
        )  # fmt: skip
        trainer.closing.callback(sampler.close)
        samplers.append(sampler)
    say_all(console, samplers[0].notes)
    if len(samplers) > 1:
        groups = "; ".join(", ".join(rollout.server.urls) for rollout in rollouts_by_group)
        console.say(f"rollout.server.urls: groups that take turns: {groups}")

    def rollouts_of(sampler: Sampler, on_main: OnMain) -> KeptRollouts:
        rollouts = Rollouts(
            sampler, tokenizer, config.rollout, seed=config.seed, end_tokens=ends.ids, system=config.data.system,
            max_prompt_length=config.data.max_prompt_length, on_main=on_main,
        )  # fmt: skip
        kept = KeptRollouts(
            rollouts, trainer.directory.pending, origin=_origin(config, folder, ends, dispatch.world_size),
            on_main=on_main, say=console.say, ahead=config.rollout.async_level, steps=config.steps_per_iteration,
        )  # fmt: skip
        trainer.closing.callback(kept.close)
        return kept

    if not level:
        return rollouts_of(samplers[0], dispatch.on_main), [SyncedSampler(samplers[0], dispatch)]
    sources: list[TrajectorySource] = []

    def open_on_main() -> None:
        fleets = [sampler.fleet for sampler in samplers if isinstance(sampler, ServerSampler)]
        for one_of_each_group in zip(*(fleet.samplers for fleet in fleets), strict=True):
            sources.extend(rollouts_of(sampler, call_here) for sampler in one_of_each_group)

    dispatch.on_main(open_on_main)
    shared = SharedRollouts(sources, dispatch.on_main, len(samplers))
    return shared, [SyncedSampler(sampler, dispatch, shares=False) for sampler in samplers]


def groups_of_servers(rollout: RolloutConfig) -> list[RolloutConfig]:
    """Returns a config for each group of servers: at level n of `async_level` servers with whole weights are n groups,
    each with its own urls."""
    if rollout.async_level < 2 or rollout.server.lora == "adapter":
        return [rollout]
    level, server = rollout.async_level, rollout.server
    urls = [server.urls[number::level] for number in range(level)]
    return [dataclasses.replace(rollout, server=dataclasses.replace(server, urls=each)) for each in urls]


def _origin(config: PPOConfig, folder: str, ends: EndTokens, world_size: int) -> dict[str, Any]:
    """Everything that the samples of given steps depend on. The weights are known by their files' sizes and times."""
    plain = to_dict(config)
    files = sorted(pathlib.Path(folder).glob("*.*"))
    environment = (config.rollout.environment or "").rpartition(":")[0]
    return {
        "config": {name: plain[name] for name in ("seed", "rollout", "data")},
        "actor": {name: plain["actor"][name] for name in ("model", "engine")},
        "model": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()],
        "environment": pathlib.Path(environment).read_text(encoding="utf-8") if environment else None,
        "world_size": world_size,
        "end_tokens": ends.added,
    }


def _probe(dispatch: WorkerDispatch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Probe:
    """Returns the text that servers are asked about after every hand-over, to compare with the actor's own
    log-probs."""
    tokens = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][: max_length - 1]
    return Probe(tokens, functools.partial(actor_log_probs, dispatch))


def actor_log_probs(dispatch: WorkerDispatch, tokens: Sequence[int]) -> list[float]:
    """Returns the actor's log-probs of `tokens[1:]` at temperature 1. Collective."""
    batch = make_batch([list(tokens)], [[1.0] * len(tokens)])
    return dispatch.forward("actor", batch)["log_probs"].tolist()
