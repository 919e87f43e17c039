"""A model that is ready to be asked, and what it is asked.

The model has its engine over all ranks, its tokenizer and its sampler. Prompts are rows of a file, as a trainer reads
them, or texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.config.checks import micro_batch_tokens
from mrl.config.inference import EvalConfig, GenerateConfig, InferenceConfig, PlaceConfig
from mrl.config.schema import RoleConfig
from mrl.data.files import BadRow
from mrl.data.formats import Chat, parse_prompt
from mrl.data.prompts import Prompt, PromptDataset, TurnEncoder, first_prompts
from mrl.data.stream import Report
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError, DataError, quoted
from mrl.inference.places import renew, weights_of
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Sampler
from mrl.rollout.rollouts import Rollouts
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import say_all
from mrl.trainers.console import Console
from mrl.trainers.rl.samplers import SyncedSampler, make_sampler
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import read_hf_config, vocab_size_of
from mrl.weights.json_file import parse_json


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, on every rank."""

    dispatch: WorkerDispatch  # its one role is the actor
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    end_tokens: tuple[int, ...]  # ids that end a completion
    sampler: Sampler
    rollouts: Rollouts
    what: str  # of its weights: a run may have a newer checkpoint than when the command began


@contextlib.contextmanager
def load_model(config: InferenceConfig, place: PlaceConfig, console: Console) -> Iterator[LoadedModel]:
    """Gives the model of `place` with its weights, ready to sample, and ends all of it afterwards. Collective."""
    console.doing(f"reading {place.given}")
    model, engine = config.model, config.engine
    vocab_size = vocab_size_of(read_hf_config(place.folder))
    tokenizer = load_tokenizer(place.tokenizer, model.trust_remote_code, config.data.chat_template)
    if place.chat_template is not None and config.data.chat_template is None:
        tokenizer.chat_template = place.chat_template
    tokens = micro_batch_tokens(engine.micro_batch, config.max_length)
    actor = build_engine(
        RoleConfig(
            model=dataclasses.replace(model, path=place.folder),
            engine=dataclasses.replace(engine, micro_batch=dataclasses.replace(engine.micro_batch, tokens=tokens)),
            optimizer=None,
            seed=config.seed,
            packing=config.data.packing,
        )
    )
    beside = config.rollout.backend != "native"
    dispatch = WorkerDispatch({"actor": actor}, offload_idle=beside and actor.device.type == "cuda")
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="mrl_weights_"))
        sampler = make_sampler(  # before there are weights: vLLM measures the memory that is free when it starts
            config.rollout, dispatch, tokenizer, folder=place.folder, dtype=model.dtype, max_length=config.max_length,
            output_dir=folder, progress=console.generated,
        )  # fmt: skip
        ends.callback(sampler.close)
        end_with = EndTokens.of(place.folder, tokenizer)
        say_all(console, end_with.notes(tokenizer, "completions end there, too"))
        rollouts = Rollouts(
            sampler, tokenizer, config.rollout, seed=config.seed, end_tokens=end_with.ids, system=config.data.system,
            max_prompt_length=config.data.max_prompt_length, on_main=dispatch.on_main,
        )  # fmt: skip
        ends.callback(rollouts.close)
        console.doing("reading the weights")
        place = dispatch.on_main(lambda: renew(place))
        _init(actor, place)
        ends.enter_context(SyncedSampler(sampler, dispatch)(0))
        yield LoadedModel(dispatch, tokenizer, vocab_size, end_with.ids, sampler, rollouts, place.what)


def _init(engine: BaseEngine, place: PlaceConfig) -> None:
    kind = read_hf_config(place.folder)["model_type"]
    if place.source is not None and engine.backend == "fsdp" and kind not in FAMILIES:
        raise ConfigError(
            "engine.backend", "fsdp", f"reads a {kind!r} model from a Hugging Face folder, and MODEL is {place.what}",
            "leave it out, or make a folder of it with `mrl convert export`",
        )  # fmt: skip
    with weights_of(place) as source:
        if source is None:
            engine.init_model()
        else:
            engine.init_model(source.reader)


class BoundedPrompts(PromptDataset):
    """Reads prompts of a file. The model's positions bound them if data.max_prompt_length is not set."""

    why_too_long: str | None = None
    split_is_of = "eval"  # as no others are read

    def too_long(self, tokens: int) -> str:
        if self.why_too_long is None:
            return super().too_long(tokens)
        return f"the prompt has {tokens} tokens, {self.why_too_long}"


def prompts_of_file(
    config: GenerateConfig | EvalConfig, loaded: LoadedModel, *, limit: int | None = None
) -> tuple[list[Prompt], Report, PromptDataset]:
    """Returns the first `limit` usable prompts of data.eval, in the order of their rows."""
    rows = BoundedPrompts(config.data, loaded.tokenizer, part="eval", vocab_size=loaded.vocab_size)
    rows.why_too_long = bound_in_words(config)
    report = Report()
    return first_prompts(rows, limit, report), report, rows


def prompt_of_text(
    text: str, index: int, config: GenerateConfig, encoder: TurnEncoder, *, tools: list[Any] | None
) -> Prompt:
    """Returns a text as a prompt: a user turn if there is a chat template, else as it is."""
    where = f"prompt {index + 1}"
    row: dict[str, Any] = {"prompt": text} | ({"tools": tools} if tools else {})
    try:
        asked = parse_prompt(row, "prompt")
        tokens = encoder.prompt(asked)
    except BadRow as error:
        raise DataError(where, why=str(error)) from None
    if not tokens:
        raise DataError(where, why="gives no tokens", fix="give a text that is not empty")
    check_length(len(tokens), config, where=where)
    content = asked.messages if isinstance(asked, Chat) else asked.text
    return Prompt(index, where, row, content, tokens)


def check_length(tokens: int, config: GenerateConfig, *, where: str) -> None:
    """Raises DataError for a prompt that is too long."""
    most = config.data.max_prompt_length
    if tokens > most:
        why = bound_in_words(config) or f"and data.max_prompt_length is {most}"
        raise DataError(where, why=f"the prompt has {tokens} tokens, {why}")


def bound_in_words(config: GenerateConfig | EvalConfig) -> str | None:
    """Returns why prompts have no more than data.max_prompt_length tokens; None if the user has set it."""
    if config.place.limit is None:
        return None
    most, new = config.data.max_prompt_length, config.rollout.max_new_tokens
    return (
        f"and {most} is the most that {config.place.limited_by} leave beside rollout.max_new_tokens {new}; shorten "
        "it, or give fewer new tokens"
    )


def read_tools(path: str | None) -> list[Any] | None:
    """Returns the function schemas in a JSON file, as chat templates take them."""
    if path is None:
        return None
    try:
        tools = parse_json(Path(os.path.expanduser(path)).read_bytes())
    except (OSError, ValueError) as error:
        why = f"cannot be read as JSON ({error})"
        raise ConfigError("--tools", quoted(path), why, "give a list of schemas") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        fix = 'write [{"type": "function", "function": {"name": ..., "parameters": ...}}]'
        raise ConfigError("--tools", quoted(path), "is no list of function schemas", fix)
    return tools
