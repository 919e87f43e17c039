"""Turns the prompts and messages of a request into token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.data.formats import Chat
from mrl.data.json_text import decode_tool_calls, template_kwargs_of, tools_of
from mrl.data.prompts import TurnEncoder
from mrl.errors import UserError
from mrl.serve.datums import Limits, check_ids
from mrl.serve.requests import field, is_ids


class Prompts:
    """The prompts of requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
        self.tokenizer, self.encoder, self.limits = tokenizer, TurnEncoder(tokenizer), limits

    def of_completions(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Returns the ids of each prompt. Raises UserError."""
        special = field(body, "add_special_tokens", bool, True)
        return [self._ids(prompt, special, f"prompt {i}") for i, prompt in enumerate(_prompts(body.get("prompt")))]

    def of_chat(self, body: Mapping[str, Any]) -> list[int]:
        """Returns the ids of messages, with the generation prompt. Raises UserError."""
        row = dict(body)
        messages = field(row, "messages", list)
        if not messages or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
            raise UserError("messages", why="is no list of messages with a role", fix="give one")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise UserError("tool_choice", body["tool_choice"], "is not done by this server", "leave it out")
        messages = [one | {"content": _text_of(one["content"])} if "content" in one else one for one in messages]
        messages = [decode_tool_calls(one, f"messages[{i}]") for i, one in enumerate(messages)]
        chat = Chat(messages=messages, tools=tools_of(row), template_kwargs=template_kwargs_of(row))
        try:
            ids = self.encoder.prompt(chat)
        except (UserError, ValueError) as error:
            raise UserError("messages", why=f"cannot be rendered: {error}") from None
        check_ids(ids, "messages", self.limits)
        return ids

    def _ids(self, prompt: Any, special: bool, where: str) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        check_ids(prompt, where, self.limits)
        return prompt


def _prompts(prompt: Any) -> list[Any]:
    """Returns the prompts of a request: texts, or lists of token ids. Raises UserError."""
    several = [prompt] if _is_one(prompt) else prompt
    if not isinstance(several, list) or not several or not all(map(_is_one, several)):
        raise UserError("prompt", why="is no text, list of texts, or list of token ids", fix="give one")
    return several


def _text_of(content: Any) -> Any:
    """Returns a message's content as chat templates take it: parts of text joined by line ends. Raises UserError."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise UserError("messages", kind, "is a part that this server does not read here", "give parts of text")
    return "\n".join(part["text"] for part in content)


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and is_ids(prompt))
