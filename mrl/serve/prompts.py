"""Turns the prompts and messages of a request into token ids. Texts that are too long are refused before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.data.formats import Chat
from mrl.data.json_text import decode_json_fields, decode_tool_calls, template_kwargs_of, tools_of
from mrl.data.turns import TurnEncoder
from mrl.errors import UserError
from mrl.serve.datums import Limits, check_ids
from mrl.serve.requests import field, is_utf8

logger = logging.getLogger("mrl.serve")

MAX_PROMPTS = 1024
SHRINKING = 4
"""A tokenizer that normalises makes a text at most so much shorter: NFC joins three characters into one."""


class Prompts:
    """The prompts of requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
        self.tokenizer, self.encoder, self.limits = tokenizer, TurnEncoder(tokenizer), limits
        self._looked_at: set[str] = set()  # fields of requests that were looked for in the template's rendering
        self.most_characters = SHRINKING * limits.length * max(map(len, tokenizer.get_vocab()))

    def of_completions(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Returns the ids of each prompt. Raises UserError."""
        special = field(body, "add_special_tokens", bool, True)
        return [self._ids(prompt, special, f"prompt {i}") for i, prompt in enumerate(_prompts(body.get("prompt")))]

    def of_chat(self, body: Mapping[str, Any]) -> list[int]:
        """Returns the ids of messages, with the generation prompt. Raises UserError."""
        row = decode_json_fields(dict(body))
        messages = field(row, "messages", list)
        if not messages or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
            raise UserError("messages", why="is no list of messages with a role", fix="give one")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise UserError("tool_choice", body["tool_choice"], "is not done by this server", "leave it out")
        messages = [one | {"content": _text_of(one["content"])} if "content" in one else one for one in messages]
        messages = [decode_tool_calls(one, f"messages[{i}]") for i, one in enumerate(messages)]
        chat = Chat(messages=messages, tools=tools_of(row), template_kwargs=template_kwargs_of(row))
        try:
            text = self.encoder.text(chat)
            self._check_length(text, "messages")
            ids = self.encoder.tokenize(text)
            self._say_left_out(chat)
        except (UserError, ValueError) as error:
            raise UserError("messages", why=f"cannot be rendered: {error}") from None
        check_ids(ids, "messages", self.limits)
        return ids

    def _say_left_out(self, chat: Chat) -> None:
        """Logs the fields of a request that the chat template leaves out, once for each field."""
        fields = {name for message in chat.messages for name in message} | set(chat.template_kwargs)
        fields |= {"tools"} if chat.tools else set()
        if not fields <= self._looked_at:
            self._looked_at |= fields
            for line in self.encoder.left_out([("a chat request", chat)]):
                logger.warning(line)

    def _ids(self, prompt: Any, special: bool, where: str) -> list[int]:
        if isinstance(prompt, str):
            if not is_utf8(prompt):
                raise UserError("prompt", prompt, "has characters that are none", "give UTF-8")
            self._check_length(prompt, where)
            prompt = self.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        check_ids(prompt, where, self.limits)
        return prompt

    def _check_length(self, text: str, where: str) -> None:
        if len(text) > self.most_characters:
            fix = f"send at most {self.limits.length} tokens, or raise serve.max_length"
            raise UserError(where, why=f"has {len(text)} characters", fix=fix)


def _prompts(prompt: Any) -> list[Any]:
    """Returns the prompts of a request: texts, or lists of token ids. Raises UserError."""
    several = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(several, list) or not several or not all(isinstance(one, str) or _is_ids(one) for one in several):
        raise UserError("prompt", why="is no text, list of texts, or list of token ids", fix="give one")
    if len(several) > MAX_PROMPTS:
        raise UserError("prompt", why=f"has {len(several)} prompts", fix=f"give at most {MAX_PROMPTS}")
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


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id) is int and abs(id) < 2**31 for id in prompt)
