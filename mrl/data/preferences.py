"""Preference rows in tokens: a better and a worse answer to a prompt, or single answers that are good or bad.

    format        fields                                              becomes
    preference    prompt, chosen, rejected: strings, or message       two answers, the chosen one first
                  lists; or chosen and rejected alone: whole
                  conversations that begin with the same messages
                  (a prompt beside them is the text of the last
                  such), or whole texts, with data.prompt_end
    unpaired      prompt, completion (strings or message lists),      one answer
                  label: true for a good one

A row's `weight` is what it counts in the loss, 1 by default. All of an answer's assistant turns train, and nothing
before them. Both answers of a row must follow the very same tokens: that is compared after the chat template, token by
token, and never made so by cutting. Tools, template arguments and images are as in mrl/data/formats.py; images stand in
the prompt.
"""

from __future__ import annotations

import copy
import dataclasses
import os.path
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.algorithms.preference import CHOSEN, OF_PAIR, WEIGHT, answer_weights, is_paired_S
from mrl.algorithms.ragged import sum_per_sequence
from mrl.batch import MTP_MASK, Batch, make_batch
from mrl.config.answers import AnswerRowsConfig
from mrl.config.dpo import PreferenceDataConfig
from mrl.config.keys import join_names
from mrl.data.dataset import EncodedRows, RejectedRow
from mrl.data.encode import Encoder, check_system
from mrl.data.ends import common_prefix_length
from mrl.data.files import BadRow, kind_of
from mrl.data.formats import Chat, Pair, Row, check_messages, fitting_format, parse_row, row_weight
from mrl.data.json_text import decode_json_fields
from mrl.data.vision import Vision
from mrl.errors import DataError

FIELDS = {"preference": ("chosen", "rejected"), "unpaired": ("prompt", "completion", "label")}
RENAME_HINT = "rename fields with data.columns, as {question: prompt, better: chosen, worse: rejected}"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt with one answer to it."""

    ids: list[int]
    mask: list[int]  # 1 for each id of the answer that trains (not shifted)
    is_chosen: bool  # or good
    multi_modal_inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """What the images of its prompt are to the model, as `Batch` has it of one sequence."""

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first that trains."""
        return self.ids[: self.mask.index(1)]


@dataclasses.dataclass(frozen=True)
class Preference:
    """A row in tokens: the chosen answer and the rejected one, or a single one."""

    answers: tuple[Answer, ...]
    weight: float = 1  # in the loss
    truncated: bool = False  # none is


def detect(row: Row) -> str:
    """Returns the one form whose fields the row has. None or both is a DataError."""
    return fitting_format(
        row, FIELDS, "are no preference: give prompt, chosen and rejected, chosen and rejected as conversations, or "
        f"prompt, completion and label; {RENAME_HINT}",
    )  # fmt: skip


def parse(row: Row, format: str, prompt_end: str | None = None) -> list[tuple[Chat | Pair, bool]]:
    """Returns each answer of a row with its prompt, and whether it is the chosen or a good one. Raises BadRow.

    prompt_end: data.prompt_end.
    """
    row = decode_json_fields(row)
    check_fields(row, FIELDS[format], format, RENAME_HINT)
    if format == "unpaired":
        label = row["label"]
        if not isinstance(label, bool) and label not in (0, 1):
            raise BadRow(f"label is {kind_of(label)}; give true for a good completion and false for a bad one")
        return [(answer_of(row, row["prompt"], "completion"), bool(label))]
    prompt = row.get("prompt")
    if prompt_end is not None or prompt is None or _is_said_again(prompt, row):
        prompt = _shared_messages(row) if prompt_end is None else _shared_text(row, prompt_end)
        rest = {name: row[name][len(prompt) :] for name in ("chosen", "rejected")}
        row = row | rest
    return [(answer_of(row, prompt, name), name == "chosen") for name in ("chosen", "rejected")]


def check_fields(row: Row, fields: Sequence[str], format: str, like: str) -> None:
    """Raises BadRow where one of the fields is missing or null. like: how fields are renamed, in words."""
    for field in fields:
        if row.get(field) is None:
            raise BadRow(f"{field} is missing or null, and {format} needs it; the row has {join_names(row)}: {like}")


def _is_said_again(prompt: Any, row: Row) -> bool:
    """Returns whether a prompt in text repeats the last message that chosen and rejected, whole conversations,
    share."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    shared = chosen[: common_prefix_length(chosen, rejected)]
    return bool(shared) and isinstance(shared[-1], dict) and shared[-1].get("content") == prompt


def are_texts(row: Row) -> bool:
    """Returns whether both answers of a pair are texts, and no prompt is beside them."""
    return row.get("prompt") is None and isinstance(row["chosen"], str) and isinstance(row["rejected"], str)


def _shared_text(row: Row, end: str) -> str:
    """Returns the prompt of a pair of whole texts: what both begin with, up to the last `end` in it."""
    if not are_texts(row):
        raise BadRow(
            "is no pair of whole texts without a prompt, and data.prompt_end needs one; leave that key out, or give it "
            "to the source with such rows alone"
        )
    texts = row["chosen"], row["rejected"]
    shared = os.path.commonprefix(texts)
    at = shared.rfind(end)
    if at < 0:
        raise BadRow(
            f"chosen and rejected do not begin with the same text up to {end!r:.40} (data.prompt_end): what both begin "
            f"with ends in {shared[-30:]!r}; set that key to what prompts end with, or remove the row"
        )
    for name, text in zip(("chosen", "rejected"), texts, strict=True):
        if end in text[at + len(end) :]:
            raise BadRow(
                f"{name} has {end!r:.40} again after the prompt that both share, so it holds later turns, and nothing "
                "separates its answer; give conversations as lists of messages, or remove the row"
            )
    return shared[: at + len(end)]


def _shared_messages(row: Row) -> list[dict[str, Any]]:
    """Returns the messages that both conversations of a row begin with."""
    for name in ("chosen", "rejected"):
        if not isinstance(row[name], list):
            raise BadRow(
                f"{name} is no list of messages, and there is no prompt; rename the field that has it with "
                "data.columns, as {question: prompt}, or set data.turns (docs/conversations.md) or data.prompt_end"
            )
        check_messages(row[name], name, parts=True)
    chosen, rejected = row["chosen"], row["rejected"]
    shared = common_prefix_length(chosen, rejected)
    if shared == 0:
        raise BadRow("chosen and rejected begin with different messages; they need the same prompt, or a field prompt")
    return chosen[:shared]


def answer_of(row: Row, prompt: Any, name: str) -> Chat | Pair:
    """Returns the prompt with the answer in the field `name`. Raises BadRow."""
    answer = row[name]
    if isinstance(prompt, list) and isinstance(answer, list):
        asked, messages = check_messages(prompt, "prompt", parts=True), check_messages(answer, name, parts=True)
        if messages[: len(asked)] == asked:
            raise BadRow(
                f"{name} begins with the messages of prompt again; leave them out of it, or rename prompt with "
                "data.columns, as {prompt: prompt_unused}, where it holds the whole conversation"
            )
    elif not (isinstance(prompt, str) and isinstance(answer, str) and answer):
        raise BadRow(
            f"prompt is {kind_of(prompt)} and {name} is {kind_of(answer)}; give two strings or two lists of messages, "
            f"or rename prompt with data.columns, as {{prompt: prompt_unused}}, where {name} is the whole conversation"
        )
    content = parse_row(row | {"prompt": prompt, "completion": answer}, "prompt_completion")
    assert isinstance(content, Chat | Pair)
    return content


def too_long(config: AnswerRowsConfig, where: str, sequences: Sequence[Any]) -> RejectedRow | None:
    """Returns why a row is left out whose longest sequence does not fit. Raises DataError where it may not be."""
    longest = max(len(sequence.ids) for sequence in sequences)
    if longest <= config.max_length:
        return None
    what = f"the row has a sequence of {longest} tokens and data.max_length is {config.max_length}"
    if config.truncation == "drop":
        return RejectedRow("dropped", f"{where}: {what}")
    # drop comes first: a resume of kto keeps its limit, to which it cuts pairs of rows
    raise DataError(f"{what}; set data.truncation to drop, or raise data.max_length")


class PreferenceDataset(EncodedRows[Preference]):
    """Rows of preferences, as `Preference`s.

    paired: the loss is of pairs, so single answers are refused. vision: of the model where it reads images.
    """

    config: PreferenceDataConfig

    def __init__(self, *args: Any, paired: bool, vision: Vision | None = None, **options: Any) -> None:
        self._paired = paired
        self._vision = copy.deepcopy(vision)  # it has a tokenizer, as in SFTDataset
        super().__init__(*args, **options)

    _form_of = staticmethod(detect)

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._make_encoder(tokenizer, "assistant")
        check_system(self.config.system, tokenizer)
        if self.config.prompt_end is not None and self.format != "preference":
            why = f"is of the format preference, and the rows of {self.path} have the format {self.format}"
            raise DataError("data.prompt_end", why=why, fix="leave it out")
        if self._paired and self.format == "unpaired":
            why = f"{self.path}: has single answers with a label, and the loss is of pairs"
            raise DataError(f"data.{self.part}", why=why, fix="set loss.name to kto, or give chosen and rejected")

    def _make(self, index: int, row: dict[str, Any]) -> Preference | RejectedRow:
        contents = parse(row, self.format, self.config.prompt_end)
        answers = tuple(self._encode(index, content, chosen) for content, chosen in contents)
        if len(answers) == 2:
            self._check_pair(*answers)
        if (rejected := too_long(self.config, self.where(index), answers)) is not None:
            return rejected
        return Preference(answers, row_weight(row))

    def encoders(self) -> list[Encoder]:
        return [self._encoder]

    def _contents(self, row: Row) -> Sequence[Any]:
        return [content for content, _ in parse(row, self.format, self.config.prompt_end)]

    def tokens_of(self, item: Preference) -> int:
        return sum(len(answer.ids) for answer in item.answers)

    def _encode(self, index: int, content: Chat | Pair, chosen: bool) -> Answer:
        if isinstance(content, Chat) and any(weight not in (None, 0, 1) for weight in content.weights):
            raise BadRow(
                "has a message with a weight other than 0 and 1; an answer's log-prob counts a token or does not"
            )
        row = self._encoded(index, content)
        encoded = row.encoded
        self._check_vocabulary(encoded.ids)
        # nothing precedes the first token, so it never trains
        mask = [0, *(int(weight) for weight in encoded.mask[1:])]
        if not any(mask):
            raise BadRow(f"has nothing to train on: none of its {len(mask)} tokens trains (the first never does)")
        if self._vision is not None and self._vision.count(encoded.ids[mask.index(1) :]):
            raise BadRow("has an image in an answer, after its first token that trains; images stand in the prompt")
        return Answer(encoded.ids, mask, chosen, row.inputs)

    def _check_pair(self, chosen: Answer, rejected: Answer) -> None:
        """Raises BadRow if the answers are the same, or do not follow the same tokens."""
        if chosen.ids == rejected.ids:
            raise BadRow("chosen and rejected are the same tokens to the tokenizer, and teach nothing; remove the row")
        if chosen.prompt != rejected.prompt:
            here, there = self._encoder.difference(chosen.prompt, rejected.prompt)
            raise BadRow(
                f"what does not train before chosen and before rejected differs ({here} and {there}); give both the "
                "same turns up to the first that trains, or a chat template that writes them alike"
            )


# ------------------------------------------------------------------------------------------------------------- batches


def batch_of(rows: Sequence[Preference], *, group: int) -> Batch:
    """Returns the global mini-batch of some rows, pairs chosen first. group: 2 where the loss is of pairs, else 1."""
    answers = [answer for row in rows for answer in row.answers]
    chosen = torch.tensor([answer.is_chosen for answer in answers])
    of_pair = [len(row.answers) == 2 for row in rows for _ in row.answers]
    fields = {CHOSEN: chosen, **({} if all(of_pair) else {OF_PAIR: torch.tensor(of_pair)})}
    fields |= weight_field([row.weight for row in rows for _ in row.answers], len(rows))
    inputs = [answer.multi_modal_inputs for answer in answers]
    made = make_batch(
        [a.ids for a in answers], [a.mask for a in answers], sequence_fields=fields, multi_modal_inputs=inputs
    )  # fmt: skip
    return with_denominators(made, group=group)


def weight_field(weights_S: Sequence[float], rows: int) -> dict[str, Tensor]:
    """Returns the sequence field of weights; none where all are 1. Raises DataError where all are 0. rows: how many
    rows they are of."""
    if all(weight == 1 for weight in weights_S):
        return {}
    if not any(weights_S):
        why = f"all {rows} rows of a batch have weight 0, so there is nothing to divide by"
        raise DataError("data", why=why, fix="leave out rows of weight 0, or raise train.global_batch_size")
    return {WEIGHT: torch.tensor(weights_S, dtype=torch.float64)}


def with_denominators(batch: Batch, *, group: int) -> Batch:
    """Returns a whole global mini-batch with the counts that `mrl.algorithms.preference` divides by."""
    chosen_S = batch.sequence_fields[CHOSEN].bool()
    weights_S = answer_weights(batch)
    tokens_S = sum_per_sequence((batch.loss_mask != 0).double(), batch.lengths)
    counts = {
        "units": float(weights_S.sum()) / group,
        "chosen": float(weights_S[chosen_S].sum()),
        "rejected": float(weights_S[~chosen_S].sum()),
        "chosen_tokens": float((weights_S * tokens_S)[chosen_S].sum()),
        "pairs": float((weights_S * is_paired_S(batch)).sum()) / 2,
    }
    return dataclasses.replace(batch, denominators={**batch.denominators, **counts}, group=group)


def with_mtp_mask(batch: Batch) -> Batch:
    """Returns a global mini-batch whose MTP layers learn chosen (or good) answers alone, each by its row's weight: they
    are to predict what the policy will say."""
    counts_S = answer_weights(batch) * batch.sequence_fields[CHOSEN]
    mask_T = (batch.loss_mask != 0) * counts_S.repeat_interleave(batch.lengths)
    return dataclasses.replace(
        batch,
        token_fields={**batch.token_fields, MTP_MASK: mask_T.float()},
        denominators={**batch.denominators, MTP_MASK: batch.denominators["chosen_tokens"]},
    )


def with_other_answers(batch: Batch, max_length: int) -> Batch:
    """Returns the prompts of a global mini-batch with answers to other prompts; kto estimates its KL from them.

    The order is the chosen sequences, then the rejected ones, then the first again. Each prompt gets the answer of the
    next sequence with another prompt; of the next sequence if all have one prompt. Sequences are cut to `max_length` at
    their end. A pure function of the batch.
    """
    chosen = batch.sequence_fields[CHOSEN].tolist()
    order = [i for i in range(len(chosen)) if chosen[i]] + [i for i in range(len(chosen)) if not chosen[i]]
    starts = batch.cu_seqlens.tolist()
    ids, masks, firsts = [], [], []
    for begin, end in zip(starts, starts[1:], strict=False):
        ids.append([*batch.tokens[begin:end].tolist(), int(batch.labels[end - 1])])
        masks.append([0, *(int(m != 0) for m in batch.loss_mask[begin:end].tolist())])
        firsts.append(masks[-1].index(1))
    of_others = _next_that_differs([ids[i][: firsts[i]] for i in order])
    others = {i: order[place] for i, place in zip(order, of_others, strict=True)}
    sequences, trained = [], []
    for i, other in sorted(others.items()):
        sequences.append((ids[i][: firsts[i]] + ids[other][firsts[other] :])[:max_length])
        trained.append(([0] * firsts[i] + masks[other][firsts[other] :])[:max_length])
    return make_batch(sequences, trained, multi_modal_inputs=batch.multi_modal_inputs)  # images are all of prompts


def _next_that_differs(prompts: Sequence[list[int]]) -> list[int]:
    """Returns for each place the next place with another prompt, with the first after the last. If all have one prompt,
    it is the next place."""
    size = len(prompts)
    following = [(place + 1) % size for place in range(size)]
    found = list(following)
    is_known = False
    for place in [*reversed(range(size))] * 2:  # what follows a prompt of the same tokens follows this one
        after = following[place]
        if prompts[place] != prompts[after]:
            found[place], is_known = after, True
        elif is_known:
            found[place] = found[after]
    return found
