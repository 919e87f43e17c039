"""The keys of `mrl generate` and `mrl eval`: those of a run that say how a model samples, and what one command asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mrl.config.checks import check_backend, check_micro_batch, check_never_trains, refuse_unread
from mrl.config.ppo import PromptsConfig, RolloutConfig
from mrl.config.ppo_checks import (
    check_batch_invariant,
    check_cuda_graphs,
    check_rollout,
)
from mrl.config.rewards import RewardsConfig, parse_rewards
from mrl.config.schema import REQUIRED, EngineConfig, ModelConfig, key
from mrl.errors import ConfigError

NOTHING_TRAINS = "by a command that trains nothing"
DEFAULT_NEW_TOKENS = 512
MAX_POSITIONS = 65536
"""Tokens of the longest sequence of a sampler with memory of its own: some models have a million positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """The keys of both commands as KEY=VALUE, with the words of `mrl ppo`."""

    seed: int = key(0, "seed of sampling", minimum=0, maximum=2**32 - 1)
    model: ModelConfig = key(REQUIRED, "how the model is read; its path is MODEL")
    engine: EngineConfig = key(EngineConfig, "its engine and layout")
    rollout: RolloutConfig = key(RolloutConfig, "how completions are sampled")
    data: PromptsConfig = key(REQUIRED, "how prompts are read")

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.data.max_prompt_length + self.rollout.max_new_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceConfig:
    """The place of a model, found by `mrl.inference.places`."""

    given: str = key(REQUIRED, "MODEL as the user wrote it")
    what: str = key(REQUIRED, "what was found there, in words")
    folder: str = key(REQUIRED, "folder with config.json and, where there is no source, the weights")
    tokenizer: str = key(REQUIRED, "folder of the tokenizer")
    source: str | None = key(None, "checkpoint or adapter that the weights are read from")
    chat_template: str | None = key(None, "text of the template that a run's config has")
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "what the weights are stored in")
    limit: int | None = key(None, "tokens of the longest sequence, where no key of the user's decides it")
    limited_by: str = key("", "what sets `limit`, in words and in the plural: the model's 4096 positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestConfig:
    """The options of `mrl generate`."""

    prompts: tuple[str, ...] = key((), "texts of --prompt, or what came on stdin, which the main process alone has")
    file: str | None = key(None, "rows of --prompts")
    chat: bool = key(False, "talk on the terminal")
    score: bool = key(False, "log-probs of completions that the rows have")
    tools: str | None = key(None, "file with a list of function schemas")
    out: str | None = key(None, "file of results")
    greedy: bool = key(False, "the most probable token each time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    place: PlaceConfig = key(REQUIRED, "where the model is")
    request: RequestConfig = key(RequestConfig, "what is asked of it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalKeys(InferenceConfig):
    """The keys of `mrl eval` as KEY=VALUE."""

    rewards: RewardsConfig | None = key(
        None, "functions that score completions; the first is what accuracy is made of", parse=parse_rewards
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRequestConfig:
    """The options of `mrl eval`."""

    task: str = key(REQUIRED, "name of the task")
    limit: int | None = key(None, "prompts, the first N")
    out: str | None = key(None, "file of the result")
    against: str | None = key(None, "file of a result to compare with")
    as_json: bool = key(False, "print the result as JSON")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(EvalKeys):
    place: PlaceConfig = key(REQUIRED, "where the model is")
    other: PlaceConfig | None = key(None, "where the model is that it is compared with")
    request: EvalRequestConfig = key(REQUIRED, "what is asked")


def check_inference(config: InferenceConfig) -> None:
    """Raises ConfigError where keys contradict each other or one would be left unread. It reads no file."""
    advice = "leave it out"
    refuse_unread(config.model, "model", NOTHING_TRAINS, advice, ("init", "lora"))
    refuse_unread(config.rollout, "rollout", NOTHING_TRAINS, advice, ("async_level", "ranks"))
    refuse_unread(config.rollout.server, "rollout.server", NOTHING_TRAINS, advice, ("lora",))
    refuse_unread(config.data, "data", "here: rows are of one path", advice, ("mix_by",))
    refuse_unread(config.data, "data", "here: rows are taken in their order", advice, ("shuffle",))
    refuse_unread(config.data, "data", NOTHING_TRAINS, advice, ("teacher",))
    if isinstance(config.data.eval, Mapping):
        why = "names several sets of rows, and here they are one"
        raise ConfigError("data.eval", why=why, fix="give one path, and run the command once for each")
    refused = {"recorded": "replays a run and asks no model", "auto": "is for `mrl ppo` alone"}
    if config.rollout.backend in refused:
        why = refused[config.rollout.backend]
        raise ConfigError("rollout.backend", config.rollout.backend, why, "give native or vllm")
    check_backend(config.model, config.engine)
    check_never_trains(config.engine, "engine", "the model")
    longest = f"data.max_prompt_length {config.data.max_prompt_length} and rollout.max_new_tokens"
    check_micro_batch(
        config.engine.micro_batch, config.max_length, f"{longest} {config.rollout.max_new_tokens} together"
    )
    check_rollout(config)
    check_cuda_graphs(config.rollout, config.engine, "engine")
    check_batch_invariant(config.rollout, config.engine, "engine")


def refuse_row_keys(data: PromptsConfig) -> None:
    """Raises ConfigError for keys of rows where prompts are texts: they would do nothing."""
    of_rows = ("columns", "split", "on_bad_row", "truncation")
    refuse_unread(data, "data", "without a file of rows", "leave it out", of_rows)
