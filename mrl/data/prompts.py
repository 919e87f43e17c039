"""The tokens that a policy is given: prompts, and the observations of an environment between its turns.

A prompt of data.train or data.eval comes with the row from which rewards are computed.

A conversation with an environment is only ever appended to. Sampled tokens are never tokenized again, since a text has
many tokenizations and the policy chose one. The text after its turn is found on a short conversation of its own. That
is rendered with the observation and the generation prompt, and read from the token that ends the assistant's turn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import PromptsConfig
from mrl.data.dataset import RejectedRow, RowDataset, teacher_of
from mrl.data.encode import NO_TEMPLATE, Encoder, check_system
from mrl.data.ends import PROBE_CONTENT
from mrl.data.files import BadRow
from mrl.data.formats import Chat, Question, check_plain, detect_prompt_form, parse_prompt
from mrl.data.left_out import left_out
from mrl.data.rows import Part
from mrl.data.stream import Report, RowStream, usable_rows
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


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A row as the policy sees it."""

    index: int  # of the row in its data set
    where: str  # its file and line, `train.jsonl:17`
    row: dict[str, Any]  # the data row, as rewards and environments get it (after data.columns)
    content: str | list[dict[str, Any]]  # the prompt as text or messages, as rewards get it
    tokens: list[int]  # what the policy is given, generation prompt included
    truncated: bool = False  # whether their start was cut
    teacher: int = 0  # the number of the one that the policy learns from, of on-policy distillation

    @property
    def conversation(self) -> Chat | Question:
        """The content with the row's tools and template arguments: a conversation, or a text and how it reads without a
        template."""
        if isinstance(self.content, str) and "prompt" not in self.row and "instruction" in self.row:
            asked = parse_prompt(self.row, "alpaca")
            if isinstance(asked, Question) and asked.text == self.content:  # it is not what an environment gave instead
                return asked
        return self.with_conversation(self.content)

    def with_conversation(self, content: str | list[dict[str, Any]]) -> Chat | Question:
        """Returns another prompt in its place, with the rest of the row. Raises BadRow."""
        row = {**self.row, "prompt": content}
        if not isinstance(content, str):
            row.pop("system", None)  # it is among the messages
        return parse_prompt(row, "prompt")


class PromptDataset(RowDataset[Prompt]):
    """Rows as prompts of at most data.max_prompt_length tokens; see mrl/data/formats.py for the forms they may have.

    A text becomes a user turn if the tokenizer has a chat template, and stays as it is otherwise. teachers: names of
    all but the first; None if rows have none.
    """

    config: PromptsConfig

    def __init__(
        self,
        config: PromptsConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        part: Part = "train",
        vocab_size: int | None = None,
        teachers: Sequence[str] | None = None,
    ) -> None:
        self._teachers = teachers
        super().__init__(config, tokenizer, part=part, vocab_size=vocab_size)

    _form_of = staticmethod(detect_prompt_form)

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encoder = TurnEncoder(tokenizer, self.config.system)
        self.form = self.detected_form()
        if self.form == "messages" and tokenizer.chat_template is None:
            raise DataError(f"data.{self.part}", why=f"{self.path}: {NO_TEMPLATE}")

    def _make(self, index: int, row: dict[str, Any]) -> Prompt | RejectedRow:
        asked = parse_prompt(row, self.form)
        ids = self._encoder.prompt(asked)
        if not ids:
            raise BadRow("gives a prompt of no tokens; give a text that is not empty, or remove the row")
        self._check_vocabulary(ids)
        limit = self.config.max_prompt_length
        too_long = len(ids) > limit
        if too_long:
            match self.config.truncation:
                case "error":
                    raise DataError(self.too_long(len(ids)))
                case "drop":
                    return RejectedRow("dropped", f"{self.where(index)}: {self.too_long(len(ids))}")
                case "left":
                    ids = ids[-limit:]
        content = asked.messages if isinstance(asked, Chat) else asked.text
        teacher = 0
        if self._teachers is not None:
            teacher = teacher_of(row, self.config.teacher, self._teachers, "reference.others")
        return Prompt(index, self.where(index), row, content, ids, too_long, teacher)

    def encoders(self) -> list[Encoder]:
        return [self._encoder.encoder]

    def unread_fields(self) -> list[str]:
        return []  # rewards and environments get all of them

    def _contents(self, row: dict[str, Any]) -> Sequence[Any]:
        return [parse_prompt(row, self.form)]

    def _left_out(self, chats: list[tuple[str, Chat]]) -> list[str]:
        return self._encoder.left_out(chats)

    def tokens_of(self, item: Prompt) -> int:
        return len(item.tokens)

    def too_long(self, tokens: int) -> str:
        """Returns the message on a prompt with too many tokens, for data.truncation error."""
        return (
            f"the prompt has {tokens} tokens and data.max_prompt_length is {self.config.max_prompt_length}; raise "
            "data.max_prompt_length, or set data.truncation to left or drop"
        )


class PromptSource(RowStream[Prompt]):
    """An endless source of prompts that can be saved and continued exactly."""

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` usable prompts. Their `index` counts the rows of all sources.

        Raises DataError as `PromptDataset.load` does, and takes none then.
        """
        taken = self._after(self._progress, count)
        self._moved(taken)
        return [dataclasses.replace(item, index=row) for item, row in zip(taken.items, taken.rows, strict=True)]


def first_prompts(dataset: RowDataset[Prompt], count: int | None, report: Report) -> list[Prompt]:
    """Returns the first `count` prompts that can be used, or all, in the order of their rows; it fills `report`.

    Raises DataError where there is none.
    """
    return [prompt for _, prompt in itertools.islice(usable_rows(dataset, report), count)]
