"""Prompts of data.train or data.eval: the policy's input, and the row from which rewards are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import PromptsConfig
from mrl.data.dataset import RejectedRow, RowDataset, teacher_of
from mrl.data.encode import NO_TEMPLATE, Encoder
from mrl.data.files import BadRow
from mrl.data.formats import Chat, Question, detect_prompt_form, parse_prompt
from mrl.data.rows import Part
from mrl.data.stream import Report, RowStream
from mrl.data.turns import TurnEncoder
from mrl.errors import DataError


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

    @staticmethod
    def _form_of(row: dict[str, Any]) -> str:
        return detect_prompt_form(row)

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


def first_prompts(dataset: RowDataset[Prompt], count: int | None = None, report: Report | None = None) -> list[Prompt]:
    """Returns the first `count` prompts that can be used, or all, in the order of their rows; it fills `report`.

    Raises DataError where there is none.
    """
    report = report if report is not None else Report()
    prompts: list[Prompt] = []
    for row in range(len(dataset)):
        if count is not None and len(prompts) == count:
            break
        prompt = report.count(dataset, row)
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise report.no_rows_left(dataset)
    return prompts
