"""Rows for a reward model, in tokens: pairs of answers, graded answers, answers with labels of their steps.

    format        fields                                              becomes
    preference    prompt, chosen, rejected: strings, or message       two sequences, the chosen one first
                  lists; or chosen and rejected alone: whole
                  conversations that begin with the same messages,
                  or whole texts; optional margin: a number
    graded        prompt, completion (strings or message lists),      one sequence
                  score: a number
    steps         prompt (a string or messages), completions: the     one sequence, read at the end of every step
                  steps of one answer, strings; labels: of each,
                  true, false, or a number from 0 to 1

A sequence is what `mrl ppo` gives a reward model (mrl/roles/frozen.py): the whole conversation through the chat
template, or, without one, prompt and answer joined, with EOS. Its score is read at `scored_token`. A row's `weight` is
what each of its pairs, answers or steps counts in the loss, 1 by default. Tools and template arguments are as in
mrl/data/formats.py.

The ends of an answer's steps are found in the rendered text by its characters, never by guessing. A step ends with the
last token that holds nothing of the next one. If a separator shares a token with the next step, the step ends before
that token. The last step ends at the token that scores the whole answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mrl.algorithms.preference import answer_weights
from mrl.algorithms.ragged import sum_per_sequence
from mrl.algorithms.scores import MARGIN, TARGETS
from mrl.batch import Batch, make_batch
from mrl.config.rm import FORMAT_OF, ScoredDataConfig
from mrl.data.dataset import EncodedRows, RejectedRow
from mrl.data.encode import Encoder, check_system
from mrl.data.files import BadRow
from mrl.data.formats import Chat, Pair, Row, Text, check_plain, fitting_format, parse_prompt, question, row_weight
from mrl.data.json_text import decode_json_fields
from mrl.data.preferences import answer_of, are_texts, check_fields, parse, too_long, weight_field
from mrl.data.vision import check_text_alone
from mrl.errors import DataError, ModelError
from mrl.weights.hf_config import pad_token_of
from mrl.words import pluralize

FIELDS = {
    "preference": ("chosen", "rejected"),
    "graded": ("prompt", "completion", "score"),
    "steps": ("prompt", "completions", "labels"),
}
RENAME_HINT = "rename fields with data.columns, as {question: prompt, answer: completion, rating: score}"
MAX_SCORE = 1e9
"""Of a score and a margin: what is larger does not survive float32 arithmetic."""


@dataclasses.dataclass(frozen=True)
class ScoredSequence:
    """A sequence and its target scores."""

    ids: list[int]
    places: tuple[int, ...]  # of the tokens whose scores are read, ascending
    targets: tuple[float, ...]  # of each: its grade or label; 0 in a pair
    called: str = dataclasses.field(default="", compare=False)  # score or label: what targets are; "" in a pair


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """A row in tokens."""

    sequences: tuple[ScoredSequence, ...]  # the chosen one and the rejected one, or one alone
    margin: float = 0.0  # by which the chosen one should be better
    weight: float = 1  # in the loss
    truncated: bool = False  # none is


def scored_token(ids: Sequence[int], pad_token_id: int | None) -> int:
    """Returns the index in `ids` for the score: the last token that is no padding; 0 if all are padding.

    transformers does the same (5, modeling_layers.GenericForSequenceClassification).
    """
    return max((place for place, token in enumerate(ids) if token != pad_token_id), default=0)


def padding(hf_config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token that pads sequences for a sequence classifier. No sequence is scored at it.

    It is config.json's, as in transformers; else the tokenizer's, else its EOS token. Raises ModelError.
    """
    for token in (pad_token_of(hf_config), tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None and 0 <= token < len(tokenizer):
            return token
    raise ModelError(
        "the tokenizer has no padding and no EOS token, and a sequence classifier needs one that pads; set pad_token "
        "in tokenizer_config.json"
    )


# ---------------------------------------------------------------------------------------------------------------- rows


def detect(row: Row) -> str:
    """Returns the one form whose fields the row has. None or several is a DataError."""
    return fitting_format(
        row, FIELDS, "are of no known form: give prompt, chosen and rejected, prompt, completion and score, or prompt, "
        f"completions and labels; {RENAME_HINT}",
    )  # fmt: skip


def _number(value: Any, name: str) -> float:
    """Returns the number in the field `name`. Raises BadRow."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_SCORE:
        raise BadRow(f"{name} is {value!r:.40}; give a number from {-MAX_SCORE:g} to {MAX_SCORE:g}")
    return float(value)


def _label(value: Any, name: str) -> float:
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise BadRow(
            f"{name} is {value!r:.40}; give true for a right step, false for a wrong one, or a number from 0 to 1"
        )
    return float(value)


def _steps(row: Row) -> tuple[list[str], list[float]]:
    """Returns the steps of a row, and the label of each. Raises BadRow."""
    steps, labels = row["completions"], row["labels"]
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            raise BadRow(f"{name} is {value!r:.40}; give a list with one entry for each step")
    if len(steps) != len(labels):
        both = f"{pluralize(len(steps), 'completion')} and {pluralize(len(labels), 'label')}"
        raise BadRow(f"has {both}; give one label for each step")
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise BadRow(f"completions[{number}] is {step!r:.40}; give the text of a step")
    return steps, [_label(label, f"labels[{number}]") for number, label in enumerate(labels)]


class ScoredDataset(EncodedRows[ScoredRow]):
    """Rows that a reward model learns from. loss: `loss.name`. pad_token_id: as the function `padding` has it.

    The attribute `padding` is that token and its text.
    """

    config: ScoredDataConfig

    def __init__(self, *args: Any, loss: str, pad_token_id: int, **options: Any) -> None:
        self._loss, self._pad = loss, pad_token_id
        super().__init__(*args, **options)

    _form_of = staticmethod(detect)

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.padding = self._pad, str(tokenizer.convert_ids_to_tokens(self._pad))
        check_system(self.config.system, tokenizer)
        self._make_encoder(tokenizer, "all", as_rendered=True)
        if self.format != FORMAT_OF[self._loss]:
            why = f"{self.path}: has rows of the format {self.format}, and loss.name {self._loss} is of others"
            raise DataError(f"data.{self.part}", why=why, fix=f"give {', '.join(FIELDS[FORMAT_OF[self._loss]])}")

    def _make(self, index: int, row: dict[str, Any]) -> ScoredRow | RejectedRow:
        row = decode_json_fields(row)
        check_fields(row, FIELDS[self.format], self.format, RENAME_HINT)
        made = {"preference": self._pair, "graded": self._graded, "steps": self._with_steps}[self.format](row)
        if (rejected := too_long(self.config, self.where(index), made.sequences)) is not None:
            return rejected
        for sequence in made.sequences:
            self._check_vocabulary(sequence.ids)
        return dataclasses.replace(made, weight=row_weight(row))

    def _contents(self, row: Row) -> list[Chat | Text]:
        """Returns the texts of a row that are read; of an answer in steps its prompt."""
        row = decode_json_fields(row)
        if self.format == "preference":
            return [self._whole(row, content) for content, _ in parse(row, "preference", self.config.prompt_end)]
        if self.format == "steps":
            return [parse_prompt(row, "prompt").chat]
        return [self._whole(row, answer_of(row, row["prompt"], "completion"))]

    def tokens_of(self, item: ScoredRow) -> int:
        return sum(len(sequence.ids) for sequence in item.sequences)

    def _pair(self, row: Row) -> ScoredRow:
        margin = 0.0 if row.get("margin") is None else _number(row["margin"], "margin")
        if not self._encoder.has_template and are_texts(row) and self.config.prompt_end is None:
            row = row | {"prompt": ""}  # without a template whole texts are scored as they are
        contents = parse(row, "preference", self.config.prompt_end)
        chosen, rejected = (self._read(row, content) for content, _ in contents)
        if chosen.ids[: chosen.places[0] + 1] == rejected.ids[: rejected.places[0] + 1]:
            raise BadRow("chosen and rejected are the same tokens to the tokenizer, and teach nothing; remove the row")
        return ScoredRow((chosen, rejected), margin)

    def _graded(self, row: Row) -> ScoredRow:
        score = _number(row["score"], "score")
        sequence = self._read(row, answer_of(row, row["prompt"], "completion"), score)
        return ScoredRow((dataclasses.replace(sequence, called="score"),))

    def _with_steps(self, row: Row) -> ScoredRow:
        steps, labels = _steps(row)
        prompt, separator = row["prompt"], self.config.step_separator
        answer: Any = separator.join(steps)
        if isinstance(prompt, list):
            answer = [{"role": "assistant", "content": answer}]
        content = self._whole(row, answer_of(row | {"completion": answer}, prompt, "completion"))
        ids, ends = encode_steps(self._encoder, content, steps, separator)
        places = [*(scored_token(ids[: end + 1], self._pad) for end in ends), scored_token(ids, self._pad)]
        if sorted(set(places)) != places:
            raise BadRow(
                "two of its steps end at the same token, as no token but the padding is between them; join such steps"
            )
        return ScoredRow((ScoredSequence(ids, tuple(places), tuple(labels), "label"),))

    def _read(self, row: Row, content: Chat | Pair, target: float = 0.0) -> ScoredSequence:
        """Returns a sequence that is scored at its end."""
        ids = self._encoder.encode(self._whole(row, content)).ids
        return ScoredSequence(ids, (scored_token(ids, self._pad),), (target,))

    def _whole(self, row: Row, content: Chat | Pair) -> Chat | Text:
        """Returns a prompt with its answer as `mrl ppo` would have a policy's completion scored."""
        if isinstance(content, Chat):
            if content.images:
                raise BadRow("has an image, which reward models do not read; leave the row out")
            check_text_alone(content)
            if content.weights:
                raise BadRow("has a weight of a message, which reward models do not take; leave it out")
            if content.messages[-1]["role"] != "assistant":
                role = content.messages[-1]["role"]
                raise BadRow(f"its last message is of the role {role}; end with the assistant's, which is scored")
            return self._encoder.with_system(content)
        if not self._encoder.has_template:
            check_plain(content)
            return Text(content.plain_prompt + content.completion)
        chat = question(row, content.prompt, content.plain_prompt).chat
        answer = {"role": "assistant", "content": content.completion}
        return self._encoder.with_system(dataclasses.replace(chat, messages=[*chat.messages, answer]))


# -------------------------------------------------------------------------------------------------------- ends of steps


_MARK = "\ue000\ue001"
"""Stands for the answer where the template is asked what it writes around it: characters that no text has."""


def encode_steps(
    encoder: Encoder, content: Chat | Text, steps: Sequence[str], separator: str
) -> tuple[list[int], list[int]]:
    """Returns token ids, and the last token of each step but the last.

    content: its last message, or the end of its text, is the steps joined by `separator`. Raises BadRow for a row's
    fault, and DataError or ModelError for the template's or tokenizer's.
    """
    if not encoder.tokenizer.is_fast:
        raise ModelError("the tokenizer tells no token's place in a text, as the ends of steps need; use the fast one")
    content = encoder.fit_tool_arguments(content) if isinstance(content, Chat) else content
    answer = separator.join(steps)
    ids = encoder.encode(content).ids
    text, start = _rendered(encoder, content, answer)
    found = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    before = len(encoder.begin(found["input_ids"])) - len(found["input_ids"]) if isinstance(content, Text) else 0
    if ids[before : before + len(found["input_ids"])] != found["input_ids"]:
        raise DataError("the tokenizer gives other tokens for the text of a conversation than for the conversation")
    ends = [start + length for length in accumulate(len(step) + len(separator) for step in steps[:-1])]
    return ids, [before + place for place in _places(found["offset_mapping"], ends, len(separator))]


def _rendered(encoder: Encoder, content: Chat | Text, answer: str) -> tuple[str, int]:
    """Returns the text to tokenize, and the offset of the answer in it before stripping."""
    if isinstance(content, Text):
        return content.text, len(content.text) - len(answer)
    text = encoder.render_text(content, content.messages)
    marked = [*content.messages[:-1], {**content.messages[-1], "content": _MARK}]
    parts = encoder.render_text(content, marked).split(_MARK)
    if len(parts) == 2:
        for shown in (answer, answer.strip()):
            if text == parts[0] + shown + parts[1]:
                return text, len(parts[0]) - answer.index(shown)
    raise BadRow(
        "the chat template writes the steps otherwise than they are, so where they end cannot be told; name another "
        "template in data.chat_template"
    )


def _places(offsets: Sequence[tuple[int, int]], ends: Sequence[int], separator: int) -> list[int]:
    """Returns the last token of each step. ends: offsets of the next steps' first characters."""
    places, token = [], 0
    for number, end in enumerate(ends):
        while token < len(offsets) and offsets[token][1] <= end:
            token += 1
        if token == 0 or token == len(offsets) or offsets[token][0] < end - separator:
            raise BadRow(
                f"completions[{number}] and completions[{number + 1}] share a token, so the first has no end; set "
                "data.step_separator to a text with tokens of its own, as a newline"
            )
        places.append(token - 1)
    return places


# ------------------------------------------------------------------------------------------------------------- batches


def scored_batch(rows: Sequence[ScoredRow], *, group: int) -> Batch:
    """Returns the global mini-batch of some rows, with the inputs and denominators of `mrl.algorithms.scores`.

    A batch has no value for a sequence's last token, because nothing is predicted after it. So one more token, 0, is
    appended. Labels train at the tokens whose score is read. group: 2 if rows are pairs, else 1.
    """
    ids, masks, targets = [], [], []
    for sequence in (sequence for row in rows for sequence in row.sequences):
        length, at = len(sequence.ids), dict(zip(sequence.places, sequence.targets, strict=True))
        ids.append([*sequence.ids, 0])
        masks.append([0.0, *(float(place in at) for place in range(length))])
        targets.append(torch.tensor([at.get(place, 0.0) for place in range(length)]))
    weights = [row.weight for row in rows for _ in row.sequences]
    margins = torch.tensor([row.margin for row in rows for _ in row.sequences])
    fields = {MARGIN: margins, **weight_field(weights, len(rows))}
    batch = make_batch(ids, masks, token_fields={TARGETS: torch.cat(targets)}, sequence_fields=fields)
    scores_S = sum_per_sequence(batch.loss_mask.double(), batch.lengths)
    units = float((answer_weights(batch) * scores_S).sum()) / group
    return dataclasses.replace(batch, denominators={**batch.denominators, "units": units}, group=group)
