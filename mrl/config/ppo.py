"""The keys of `mrl ppo`: roles, rollout, algorithm, and what they share with `mrl sft`.

Counts are in optimizer steps and in sequences. An iteration trains on a rollout of `train.global_batch_size` sequences
(prompts times `rollout.samples_per_prompt`). It has `algorithm.epochs * global_batch_size / mini_batch_size` steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mrl.config.build import build_section
from mrl.config.recipes import ALGORITHMS
from mrl.config.rewards import RewardsConfig, parse_rewards
from mrl.config.schema import (
    MAX_DEGREE,
    MAX_SECONDS,
    MAX_SEQUENCES,
    REQUIRED,
    CheckpointConfig,
    DivergenceConfig,
    EngineConfig,
    LogConfig,
    LoraConfig,
    OneTeacherConfig,
    OptimizerConfig,
    PolicyModelConfig,
    RoleModelConfig,
    TeacherServerConfig,
    key,
    other_teachers,
)
from mrl.config.sources import TRAIN_HELP, PromptShare, RowsConfig, Source, eval_of, train_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    model: PolicyModelConfig = key(REQUIRED, "the policy that is trained")
    engine: EngineConfig = key(EngineConfig, "its engine and layout")
    optimizer: OptimizerConfig = key(OptimizerConfig, "the optimizer and its schedule, over the steps of the actor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticModelConfig(RoleModelConfig):
    lora: LoraConfig | None = key(None, "low-rank adapters, as actor.model.lora; null trains all of its weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    model: CriticModelConfig = key(
        CriticModelConfig, "the critic's starting model: a language model, or a sequence classifier with one label"
    )
    engine: EngineConfig | None = key(None, "its engine and layout; null is the actor's")
    optimizer: OptimizerConfig = key(OptimizerConfig, "the optimizer and its schedule, over the steps of the run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    model: RoleModelConfig = key(RoleModelConfig, "the policy that the KL is measured against")
    engine: EngineConfig | None = key(None, "its engine and layout; null is the actor's")
    update_every: int | None = key(
        None,
        "copy the actor's weights every N steps, at the end of the iteration; null is never",
        minimum=1,
    )
    server: TeacherServerConfig | None = key(
        None,
        "with algorithm opd, a server with the teacher instead of an engine: vLLM, or mrl serve",
        may_change=True,
    )
    others: Mapping[str, OneTeacherConfig] = key(
        dict,
        "with algorithm opd, more teachers by name, each with its own `model`, `engine` and `server`. A row learns "
        "from the one that its `teacher`, or that of its source, names; else from reference.model",
        parse=other_teachers,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    model: RoleModelConfig = key(
        RoleModelConfig,
        "a sequence classifier with one label, or a critic that mrl exported, with its own tokenizer and chat "
        "template (docs/rewards.md). A null path means no reward model",
    )
    engine: EngineConfig | None = key(None, "its engine and layout; null is the actor's")
    weight: float = key(1.0, "factor of its score in the total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    urls: tuple[str, ...] = key((), "servers, as http://host:8000; none means engines inside the trainer's processes")
    weights_dir: str | None = key(
        None, "folder for new weights that trainer and servers share; null is one in output_dir"
    )
    handover: Literal["auto", "disk", "broadcast", "ipc"] = key(
        "auto",
        "how new weights reach the servers: disk (files in weights_dir), broadcast (over NCCL, or gloo on CPUs) or "
        "ipc (memory of a machine that both are on). auto is ipc or broadcast if the actor is on a GPU and all "
        "servers take it, else disk",
    )
    lora: Literal["merged", "adapter"] = key(
        "merged",
        "what servers get from an actor with adapters. merged: all weights, with the adapters added in. adapter: the "
        "adapters alone, as files in weights_dir; servers must have the base and be started for adapters",
    )
    bucket_mb: int = key(
        512, "megabytes of weights that are sent at once, in a file or a message", minimum=1, maximum=10**6
    )
    concurrency: int = key(128, "requests at a time at each server", minimum=1, maximum=MAX_DEGREE)
    timeout_s: float = key(600.0, "longest wait for an answer", above=0, maximum=MAX_SECONDS)
    sleep: bool = key(False, "servers give their GPU memory back while the trainer trains (docs/rollout-servers.md)")
    memory_fraction: float = key(
        0.5,
        "share of a GPU's memory for an engine inside the trainer while it samples: weights, activations and KV cache",
        above=0,
        maximum=1,
    )
    tp: int = key(
        1, "processes that share one engine inside the trainer (tensor parallel)", minimum=1, maximum=MAX_DEGREE
    )


DEFAULT_CACHE = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    backend: Literal["native", "vllm", "sglang", "recorded", "auto"] = key(
        "native",
        "what samples: native is the actor's own engine, vllm and sglang are servers or engines, recorded "
        "replays saved rollouts. auto is vllm inside the trainer where that is possible, else native "
        "(docs/rollout-servers.md)",
    )
    samples_per_prompt: int = key(8, "completions of each prompt: a group", minimum=1)
    max_new_tokens: int = key(
        512, "tokens after the prompt; in conversations with an environment all turns together", minimum=1
    )
    temperature: float = key(1.0, "divides the logits, of the sampler and of the trainer", minimum=0.01, maximum=100)
    top_k: int = key(0, "sample from the k most probable tokens; 0 for all", minimum=0)
    top_p: float = key(1.0, "sample from the fewest tokens whose probabilities reach p; 1 for all", above=0, maximum=1)
    min_p: float = key(
        0.0, "sample from tokens of at least this fraction of the largest probability", minimum=0, maximum=1
    )
    stop: tuple[str, ...] = key((), "texts that end a completion, next to the model's own end tokens")
    stop_tokens: tuple[int, ...] = key((), "token ids that end a completion, next to the model's own", minimum=0)
    cache_tokens: int | Literal["auto"] = key(
        DEFAULT_CACHE,
        "for backend native: tokens in the KV cache of a replica of the model, at least one longest sequence. "
        "Conversations between turns may take half of it. auto: 65536, but on GPUs what all sequences of a step need, "
        "or the most that `mrl plan` says fits (docs/plan.md)",
        minimum=1,
        may_change=True,
    )
    prefill_tokens: int = key(4096, "most prompt tokens in one forward", minimum=1, may_change=True)
    cuda_graphs: bool = key(
        False,
        "decode one token of each sequence in fixed shapes, which a GPU replays as CUDA graphs (megatron backend, "
        "docs/decoding.md)",
        may_change=True,
    )
    async_level: int = key(
        0,
        "iterations by which sampling is ahead of training: 0 samples, then trains; 1 samples the next rollout on "
        "servers meanwhile; more samples as many, with as many servers or with adapters (docs/async-rollouts.md)",
        minimum=0,
        maximum=8,
    )
    ranks: int = key(
        0,
        "processes, the last ones, that sample with the actor's engine beside training (backend native, async_level 1; "
        "docs/async-rollouts.md); rollout.server.tp of them share a model",
        minimum=0,
        maximum=MAX_DEGREE,
        may_change=True,
    )
    path: str | None = key(None, "folder of samples/ files to replay, for backend recorded")
    environment: str | None = key(None, "path.py:Class for conversations of several turns (docs/environments.md)")
    max_turns: int = key(8, "turns of the model in a conversation with an environment", minimum=1)
    max_turn_tokens: int | None = key(
        None, "most tokens of one such turn; null is as many as max_new_tokens leaves", minimum=1
    )
    environment_parts: int = key(
        2,
        "groups of conversations: while the environments of one answer, another generates",
        minimum=1,
        maximum=1024,
        may_change=True,
    )
    environment_timeout_s: float = key(
        60.0, "longest wait for one reset or step of an environment", above=0, maximum=MAX_SECONDS, may_change=True
    )
    server: ServerConfig = key(ServerConfig, "for the backends vllm and sglang", may_change=True)

    @property
    def samples_itself(self) -> bool:
        """Whether the actor's own engine samples, which `auto` counts as until a run has chosen."""
        return self.backend in ("native", "auto")

    @property
    def vllm_inside(self) -> bool:
        """Whether vLLM samples in the trainer's processes."""
        return self.backend == "vllm" and not self.server.urls

    @property
    def cache_limit(self) -> int:
        """Returns `cache_tokens`, but the default for auto."""
        return DEFAULT_CACHE if self.cache_tokens == "auto" else self.cache_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(DivergenceConfig):
    """Chooses the divergence that algorithm opd minimizes, with the keys of `teacher` of `mrl sft`."""

    loss: Literal["forward_kl", "reverse_kl", "jsd"] = key(
        "reverse_kl", "the divergence of the student's distributions from the teacher's"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """`name` chooses a recipe; null in a part means "as the recipe says" (mrl.algorithms.recipes)."""

    name: str = key(REQUIRED, f"{', '.join(ALGORITHMS[:-1])} or {ALGORITHMS[-1]}")
    epochs: int = key(1, "passes over the sequences of a rollout", minimum=1)
    mini_batch_size: int | None = key(
        None,
        "sequences (not prompts) per optimizer step, shuffled over all prompts; divides train.global_batch_size, which "
        "null means: one step per epoch",
        minimum=1,
    )
    critic_warmup: int = key(0, "steps at the start in which the critic alone learns", minimum=0)
    advantage: str | None = key(None, "gae, returns, remax, grpo, group_mean or rloo")
    objective: str | None = key(None, "clip, cispo or policy_gradient")
    ratio: str | None = key(None, "token, sequence or sequence_token")
    aggregation: str | None = key(
        None,
        "token_mean (over the mini-batch's tokens), sequence_mean (over sequences of each one's mean) or fixed_length "
        "(over sequences times rollout.max_new_tokens)",
    )
    whiten: bool | None = key(None, "shift and scale the rollout's advantages to mean 0 and variance 1")
    gamma: float | None = key(None, "discount per token, with advantage gae, returns or remax", minimum=0, maximum=1)
    lam: float | None = key(None, "GAE's lambda", minimum=0, maximum=1)
    clip_low: float | None = key(None, "the ratio is clipped below 1 - this", minimum=0)
    clip_high: float | None = key(None, "the ratio is clipped above 1 + this", minimum=0)
    dual_clip: float | None = key(None, "bound of the ratio if the advantage is negative; 0 is none", minimum=0)
    value_clip: float | None = key(None, "how far a value may move from the old one; 0 is no bound", minimum=0)
    kl_in: str | None = key(
        None,
        "where the KL to the reference counts: reward (taken off each token's reward), loss (added to the actor's "
        "loss), or none",
    )
    distill: DistillConfig | None = key(
        None,
        "with opd: minimize the divergence from the teacher's distribution at each sampled token. null: the KL of "
        "the sampled tokens is their reward (docs/distill-on-policy.md)",
    )
    kl_estimator: str | None = key(None, "k1, k2 or k3")
    kl_cap: float | None = key(None, "largest k3 of a token (10 in verl); 0 is none", minimum=0)
    kl_coef: float | None = key(None, "coefficient of the KL; with kl_target, its first value", minimum=0)
    kl_target: float | None = key(
        None, "KL in nats per sequence that kl_coef is steered to; 0 keeps kl_coef", minimum=0
    )
    kl_gain: float | None = key(None, "how fast kl_coef is steered to kl_target", minimum=0)
    entropy_coef: float | None = key(None, "coefficient of the entropy bonus")
    correction: str | None = key(None, "importance correction between rollout and trainer: none, truncate or mask")
    correction_level: str | None = key(None, "token or sequence")
    correction_cap: float | None = key(None, "largest importance weight", above=0)
    correction_floor: float | None = key(None, "smallest importance weight, for mask", minimum=0)
    dynamic_sampling: bool | None = key(None, "sample again for prompts whose completions all have the same reward")
    max_sampling_rounds: int = key(10, "rounds of dynamic sampling before the run stops", minimum=1, may_change=True)
    overlong_fraction: float | None = key(
        None,
        "last share of max_new_tokens, counted as there, over which a length penalty grows; 0 is none",
        minimum=0,
        maximum=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig(RowsConfig):
    train: str | tuple[PromptShare, ...] = key(REQUIRED, TRAIN_HELP, moves=True, parse=train_of(PromptShare))
    eval: str | dict[str, Source] | None = key(
        None,
        "evaluation rows in the same forms, or a mapping of names to sources, each with its own metrics",
        may_change=True,
        parse=eval_of(Source),
    )
    system: str | None = key(None, "a system message before every prompt")
    teacher: str | None = key(
        None, "teacher of rows that name none, by its name in reference.others; null is reference.model"
    )
    max_prompt_length: int = key(1024, "longest prompt in tokens", minimum=1, long_rows=True)
    truncation: Literal["error", "left", "drop"] = key(
        "error",
        "a longer prompt stops the run, loses its start (left), or is skipped (drop); counted and reported",
        long_rows=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOTrainConfig:
    steps: int | None = key(None, "optimizer steps, in whole iterations; excludes `epochs`", minimum=1, may_change=True)
    epochs: float | None = key(
        None,
        "passes over the prompts, in whole iterations; dynamic sampling may take more. Excludes `steps`; neither "
        "means one",
        above=0,
        maximum=1e6,
        may_change=True,
    )
    global_batch_size: int = key(
        REQUIRED,
        "sequences of an iteration: prompts times rollout.samples_per_prompt",
        minimum=1,
        maximum=MAX_SEQUENCES,
    )
    eval_every: int | None = key(
        None,
        "evaluate before training, every N steps and at the end. null: at the end only, if data.eval is set",
        minimum=1,
        may_change=True,
    )
    eval_samples: int = key(
        1, "completions per held-out prompt: 1 is greedy, k sampled ones give pass@k", minimum=1, may_change=True
    )
    eval_prompts: int | None = key(
        None, "held-out prompts, the first N of each set; null for all", minimum=1, may_change=True
    )
    offload_idle: Literal["auto", "always", "never"] = key(
        "auto",
        "move the state of idle roles to host memory. auto does on a GPU, and does not on a CPU",
        may_change=True,
    )
    guards: bool = key(
        True,
        "check the first rollout, the ratios of the actor's first step, and each role until all its parameters train. "
        "With one step a rollout, false costs one more forward of the actor",
        may_change=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOCheckpointConfig(CheckpointConfig):
    best: str | None = key(
        None,
        "metric whose best checkpoint is kept too, such as eval/accuracy. That is measured on the saved weights; "
        "metrics of a rollout or step are measured before its update",
    )
    best_is: Literal["highest", "lowest"] = key("highest", "what is best")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    every: int | None = key(
        1, "write the first rollout, one every N steps, and evaluations; null is none", minimum=1, maximum=10**9
    )
    keep: int | None = key(
        None, "newest rollouts and newest evaluations that are kept; null for all", minimum=1, maximum=10**9
    )
    max_mb: int | None = key(
        1024,
        "largest size of the folder; above it the oldest files are removed. null is no limit",
        minimum=1,
        maximum=10**9,
    )
    tokens: bool = key(
        True,
        "also write tokens, mask, log-probs and advantages; a replay (rollout.path) needs the first three",
    )
    compress: bool = key(False, "write .jsonl.gz")


def parse_samples(raw: Any, path: str) -> SamplesConfig:
    """Returns the section, which true or false may stand for."""
    if isinstance(raw, bool):
        return SamplesConfig(every=1 if raw else None)
    return build_section(SamplesConfig, raw, path, PPOConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOLogConfig(LogConfig):
    samples: SamplesConfig = key(
        SamplesConfig,
        "rollouts that are written to output_dir/samples as JSONL. true is every step, false none",
        parse=parse_samples,
    )
    table: int = key(3, "samples of a rollout shown on the console; 0 for none", minimum=0)
    table_every: int = key(
        20, "show samples of the first rollout and once every N steps, on the console, in wandb and in tensorboard",
        minimum=1, maximum=10**9,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig:
    output_dir: str = key(REQUIRED, "the run's directory", may_change=True)
    seed: int = key(0, "seed of initialisation, dropout, data order and sampling", minimum=0, maximum=2**32 - 1)
    actor: ActorConfig = key(REQUIRED, "the policy")
    critic: CriticConfig = key(CriticConfig, "the value function, for algorithms that have one")
    reference: ReferenceConfig = key(ReferenceConfig, "the reference policy, for algorithms with a KL penalty")
    reward: RewardModelConfig = key(RewardModelConfig, "a reward model, with or instead of functions")
    rewards: RewardsConfig | None = key(None, "functions that score completions (docs/rewards.md)", parse=parse_rewards)
    rollout: RolloutConfig = key(RolloutConfig, "how completions are sampled")
    algorithm: AlgorithmConfig = key(
        REQUIRED, "what is learned from them. A part that is null has the value that algorithm.name stands for"
    )
    data: PromptsConfig = key(REQUIRED, "the prompts")
    train: PPOTrainConfig = key(REQUIRED, "length of the run")
    checkpoint: PPOCheckpointConfig = key(PPOCheckpointConfig, "saving and resuming", may_change=True)
    log: PPOLogConfig = key(PPOLogConfig, "where metrics and samples go", may_change=True)

    @property
    def mini_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.algorithm.mini_batch_size or self.train.global_batch_size

    @property
    def prompts_per_iteration(self) -> int:
        return self.train.global_batch_size // self.rollout.samples_per_prompt

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps on one rollout."""
        return self.algorithm.epochs * (self.train.global_batch_size // self.mini_batch_size)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.data.max_prompt_length + self.rollout.max_new_tokens
