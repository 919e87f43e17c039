"""The prompts that a command is given: rows of a file, as a trainer reads them, or texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mrl.config.inference import EvalConfig, GenerateConfig, InferenceConfig
from mrl.data.files import BadRow
from mrl.data.formats import Chat, parse_prompt
from mrl.data.prompts import Prompt, PromptDataset, first_prompts
from mrl.data.stream import Report
from mrl.data.turns import TurnEncoder
from mrl.errors import ConfigError, DataError, quoted
from mrl.inference.loaded import LoadedModel
from mrl.weights.json_file import parse_json


class BoundedPrompts(PromptDataset):
    """Reads prompts of a file. The model's positions bound them if data.max_prompt_length is not set."""

    why_too_long: str | None = None
    split_is_of = "eval"  # as no others are read

    def too_long(self, tokens: int) -> str:
        if self.why_too_long is None:
            return super().too_long(tokens)
        return f"the prompt has {tokens} tokens, {self.why_too_long}"


def prompts_of_file(
    config: InferenceConfig, loaded: LoadedModel, *, limit: int | None = None, bounded: str | None = None
) -> tuple[list[Prompt], Report, PromptDataset]:
    """Returns the first `limit` usable prompts of data.eval, in the order of their rows.

    bounded: their bound in words; None if the user has set it.
    """
    rows = BoundedPrompts(config.data, loaded.tokenizer, part="eval", vocab_size=loaded.vocab_size)
    rows.why_too_long = bounded
    report = Report()
    return first_prompts(rows, limit, report), report, rows


def prompt_of_text(
    text: str,
    index: int,
    config: InferenceConfig,
    encoder: TurnEncoder,
    *,
    tools: list[Any] | None,
    bounded: str | None,
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
    check_length(len(tokens), config, where=where, bounded=bounded)
    content = asked.messages if isinstance(asked, Chat) else asked.text
    return Prompt(index, where, row, content, tokens)


def check_length(tokens: int, config: InferenceConfig, *, where: str, bounded: str | None) -> None:
    """Raises DataError for a prompt that is too long."""
    most = config.data.max_prompt_length
    if tokens > most:
        why = bounded or f"and data.max_prompt_length is {most}"
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
