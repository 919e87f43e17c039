"""Makes the batch of a check: the first rows of the user's data, read by the code of training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from mrl.batch import Batch
from mrl.config.answers import AnswersConfig
from mrl.config.schema import DataConfig, ModelConfig
from mrl.data.batches import BatchSource, batch_of
from mrl.data.dataset import Example, SFTDataset
from mrl.data.mixture import train_rows
from mrl.data.tokenizer import load_tokenizer
from mrl.data.vision import load_vision
from mrl.errors import DataError
from mrl.trainers.rows import Task
from mrl.weights.hf_config import read_hf_config, vocab_size_of

C = TypeVar("C", bound=AnswersConfig)

MIN_TOKENS = 16
"""Tokens of an answer with its prompt, at least."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Is the batch of both sides."""

    examples: Sequence[Example]  # as the reference takes them: labels not shifted
    fields: Sequence[Mapping[str, Tensor]]  # of each example's labels; () for none
    batch: Batch  # as engines take them
    words: str
    ctx: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The loss function's `ctx`."""

    def problems(self) -> list[str]:
        """Returns how the batch differs from its rows. Labels are shifted here a second time."""
        batch, lengths = self.batch, [len(example.ids) - 1 for example in self.examples]
        if batch.lengths.tolist() != lengths:
            return [f"lengths: the sequences have {batch.lengths.tolist()} tokens, and should have {lengths}"]
        masks = [[float(trains) for trains in example.mask[1:]] for example in self.examples]
        problems = [
            _wrong("tokens", batch.tokens, [example.ids[:-1] for example in self.examples]),
            _wrong("labels", batch.labels, [example.ids[1:] for example in self.examples]),
            _wrong("loss mask", batch.loss_mask, masks),
        ]
        counts = {"tokens": sum(map(sum, masks)), "sequences": sum(any(mask) for mask in masks)}
        for name, count in counts.items():
            if (was := batch.denominators.get(name)) != count:
                problems.append(f"denominators: {name} is {was}, and the rows have {count:g}")
        return [text for text in problems if text is not None]


def _wrong(name: str, actual: Tensor, expected: Sequence[Sequence[float]]) -> str | None:
    """Returns in words the places of a field of the batch that differ from rows."""
    for number, (row_T, right) in enumerate(zip(actual.split([len(row) for row in expected]), expected, strict=True)):
        row = row_T.tolist()
        if row != list(right):
            places = sum(a != b for a, b in zip(row, right, strict=True))
            text = f"{name}: wrong at {places} of {len(right)} places of sequence {number}"
            return text + _shift(row, list(right))
    return None


def _shift(actual: list[float], expected: list[float]) -> str:
    """Returns in words by how many places a row is shifted, if it is."""
    for places in (-2, -1, 1, 2):
        low, high = max(0, places), len(expected) + min(0, places)
        if len(expected) > 4 and actual[low:high] == expected[low - places : high - places]:
            return f"; they are those {abs(places)} {'earlier' if places > 0 else 'later'}"
    return ""


def first_rows(
    data: DataConfig, model: ModelConfig, *, of_batch: int, seed: int, sequences: int, length: int
) -> Rows:  # fmt: skip
    """Returns the first rows of the first global batch.

    model: its path is a folder. of_batch: sequences of that batch. length: tokens of a sequence at most.
    """
    tokenizer = load_tokenizer(model.path, model.trust_remote_code, data.chat_template)
    hf_config = read_hf_config(model.path)
    vision = load_vision(model.path, hf_config)
    vocab_size = vocab_size_of(hf_config)
    dataset = train_rows(data, lambda one: SFTDataset(one, tokenizer, vocab_size=vocab_size, vision=vision))
    count = min(sequences, of_batch)
    source = BatchSource(dataset, global_batch_size=count, seed=seed, shuffle=data.shuffle, prefetch=False)
    whole = [taken.items[0] for taken in itertools.islice(source.walk(), count)]
    source.close()
    shown = [shortened(example, length) for example in whole]
    words = f"data.train: the first {count} of the {of_batch} sequences of the first batch"
    if any(len(a.ids) != len(b.ids) for a, b in zip(shown, whole, strict=True)):
        words += f", of each at most {length} tokens around the first that trains"
    batch = batch_of(shown)
    return Rows(shown, (), batch, counted(words, batch))


def first_items(make: Callable[[C], Task[C]], config: C, folder: str, *, rows: int) -> tuple[list[Any], str]:
    """Returns the items of the first rows of the first batch of a command on answers, and words on which rows these
    are.

    make: its task. folder: of the model.
    """
    of_batch = config.train.global_batch_size
    rows = min(rows, of_batch)
    task = make(dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=rows)))
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.chat_template)
    hf_config = read_hf_config(folder)
    dataset = train_rows(config.data, lambda data: task.of_data(data).dataset(tokenizer, folder, hf_config, "train"))
    source = task.source(dataset)
    try:
        found = [taken.items[0] for taken in itertools.islice(source.walk(), rows)]
        task.batch_of(found)  # which refuses rows that make none
    finally:
        source.close()
    return found, f"data.train: the first {rows} of the {of_batch} rows of the first batch"


def shortened(example: Example, length: int) -> Example:
    """Returns at most `length` tokens of a row, some of which train. One with images stays whole."""
    if len(example.ids) <= length or example.multi_modal_inputs:
        return example
    first = next((i for i, trains in enumerate(example.mask) if trains and i > 0), 0)
    start = max(0, min(first - length // 2, len(example.ids) - length))
    stop = start + length
    return Example(example.ids[start:stop], example.mask[start:stop], True)


def counted(words: str, batch: Batch) -> str:
    """Returns the words on a batch, with its tokens. Raises DataError if it has none."""
    if not batch.num_tokens:
        raise DataError("data.train", why="gives no tokens", fix="check the first rows")
    return f"{words} ({batch.num_tokens:,} tokens, {int((batch.loss_mask != 0).sum()):,} labels train)"
