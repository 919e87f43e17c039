"""The tokens that a policy is given: prompts, and the observations of an environment between its turns.

A conversation with an environment is only ever appended to. Sampled tokens are never tokenized again, since a text has
many tokenizations and the policy chose one. The text after its turn is found on a short conversation of its own. That
is rendered with the observation and the generation prompt, and read from the token that ends the assistant's turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.data.encode import NO_TEMPLATE, Encoder, check_system
from mrl.data.ends import PROBE_CONTENT
from mrl.data.formats import Chat, Question, check_plain
from mrl.data.left_out import left_out
from mrl.errors import DataError


class TurnEncoder:
    """Tokens of prompts and observations. system: data.system. Raises BadRow for what is at fault in a row or an
    observation, and DataError for the template, the tokenizer or the config."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self.encoder = Encoder(tokenizer, "all")
        self.has_template, self.system = self.encoder.has_template, system
        check_system(system, tokenizer)

    def prompt(self, asked: Chat | Question) -> list[int]:
        """Returns the tokens of a prompt, with the generation prompt where there is a chat template."""
        if isinstance(asked, Question) and not self.has_template:
            check_plain(asked)
            encoded = self.encoder.tokenize(asked.plain)
            return self.encoder.begin(encoded) if encoded else []
        if not self.has_template:
            raise DataError(NO_TEMPLATE)
        chat = dataclasses.replace(asked.chat, messages=self._with_system(asked.chat.messages))
        chat = self.encoder.fit_tool_arguments(chat)
        return self.encoder.tokenize(self.encoder.render_text(chat, chat.messages, prompt=True))

    def left_out(self, asked: Iterable[tuple[str, Chat]]) -> list[str]:
        """Returns lines of `mrl.data.left_out` on prompts, each with its place; none without a chat template."""
        chats = ((at, dataclasses.replace(c, messages=self._with_system(c.messages))) for at, c in asked)
        return left_out(self.encoder, chats)

    def observation(self, content: str | list[dict[str, Any]], chat: Chat, last_token: int) -> list[int]:
        """Returns the tokens from the policy's turn that ended with `last_token` to the start of its next turn.

        content: text is a user turn; without a chat template it is taken as it is. chat: of the prompt, for its tools
        and template arguments. A turn without the template's end gets that end first.
        """
        if not self.has_template:
            if not isinstance(content, str):
                raise DataError(NO_TEMPLATE)
            return self.encoder.tokenize(content)
        ids = self._after_a_turn([{"role": "user", "content": content}] if isinstance(content, str) else content, chat)
        return ids[1:] if ids[0] == last_token else ids

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.system is None:
            return messages
        if any(message["role"] == "system" for message in messages):
            raise DataError("data.system", why="is set, and the row has a system message", fix="remove one of the two")
        return [{"role": "system", "content": self.system}, *messages]

    def _after_a_turn(self, messages: list[dict[str, Any]], chat: Chat) -> list[int]:
        """Returns the tokens from the end-of-turn token of an assistant's turn to the end of the generation prompt.

        The text after the turn is tokenized alone: it begins with a special token, over which no token reaches.
        """
        begin = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE_CONTENT}]
        chat = self.encoder.fit_tool_arguments(dataclasses.replace(chat, messages=begin + messages))
        text = self.encoder.render_text(chat, chat.messages, prompt=True)
        _, found, after = text.partition(PROBE_CONTENT)
        if not found:
            raise DataError(
                "the chat template leaves out an assistant turn that others follow, so what follows one cannot be "
                "told; name another in data.chat_template"
            )
        ids = self.encoder.tokenize(after)
        special = self.encoder.special_ids
        end = next((i for i, token in enumerate(ids) if token in special), len(ids))
        if end == len(ids) or self.encoder.tokenizer.decode(ids[:end]).strip():
            raise DataError(
                f"the chat template follows an assistant turn with {after[:40]!r}: no special token begins it, so the "
                "end of a turn of the policy cannot be told; write {{ eos_token }} after the content in "
                "data.chat_template, or mark its end token special"
            )
        return ids[end:]
