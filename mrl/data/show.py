"""Rows as people read them: the text of their tokens with what trains marked, and their lengths.

Dimensions: a sequence has `T` tokens, of which the first never trains: nothing precedes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from mrl.data.dataset import Example
from mrl.data.preferences import Preference
from mrl.data.prompts import Prompt
from mrl.data.scored import ScoredRow
from mrl.errors import printable

ENDS, MOST = 300, 640  # tokens shown at each end of a sequence with more than MOST
OPEN, CLOSE = "⟦", "⟧"
TRAINS, OTHER_WEIGHT, CONTEXT, RESET = "\x1b[1;32m", "\x1b[1;35m", "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class ShownSequence:
    """One sequence of a row. weights_T: of each token in the loss, 0 where it does not train, or no score is read."""

    name: str  # what it is in its row: "" where the row is this sequence alone
    ids_T: Sequence[int]
    weights_T: Sequence[float]
    targets: Mapping[int, str] = dataclasses.field(default_factory=dict)  # place of a token -> "label 1": its score's
    note: str = ""  # on the line above its text

    @property
    def trained(self) -> int:
        return sum(weight != 0 for weight in self.weights_T)


def sequences_of(item: object) -> list[ShownSequence]:
    """Returns the sequences of a row in tokens."""
    match item:
        case Example():
            return [ShownSequence("", item.ids, _shown_weights(item.mask))]
        case Preference():
            names = {True: "chosen", False: "rejected"} if len(item.answers) > 1 else {True: "good", False: "bad"}
            note = _note(weight=item.weight)
            return [ShownSequence(names[a.is_chosen], a.ids, _shown_weights(a.mask), note=note) for a in item.answers]
        case ScoredRow():
            parts = ["chosen", "rejected"] if len(item.sequences) > 1 else [""]
            note = _note(margin=item.margin, weight=item.weight)
            sequences = []
            for name, sequence in zip(parts, item.sequences, strict=True):
                targets = {}
                if sequence.called:
                    texts = [f"{sequence.called} {target:g}" for target in sequence.targets]
                    targets = dict(zip(sequence.places, texts, strict=True))
                is_read = [float(place in sequence.places) for place in range(len(sequence.ids))]
                sequences.append(ShownSequence(name, sequence.ids, is_read, targets, note))
            return sequences
        case Prompt():
            return [ShownSequence("prompt", item.tokens, [0.0] * len(item.tokens))]
    raise TypeError(f"no sequences are known of a {type(item).__name__}")


def _note(*, margin: float = 0, weight: float) -> str:
    """Returns a row's margin and weight in words, if they are not the defaults."""
    parts = ([f"margin {margin:g}"] if margin else []) + ([f"weight {weight:g}"] if weight != 1 else [])
    return ", ".join(parts)


def _shown_weights(mask: Sequence[float]) -> list[float]:
    return [0.0, *map(float, mask[1:])]


def text_lines(tokenizer: PreTrainedTokenizerBase, of: ShownSequence, *, coloured: bool) -> Iterator[str]:
    """Yields the text of a sequence, line by line, without the middle if it is long."""
    tokens, total = list(_tokens(of)), len(of.ids_T)
    if total <= MOST:
        yield from _marked(tokenizer, tokens, coloured)
        return
    yield from _marked(tokenizer, tokens[:ENDS], coloured)
    left_out = of.weights_T[ENDS:-ENDS]
    yield f"... {len(left_out):,} tokens, {sum(w != 0 for w in left_out):,} of them train ..."
    yield from _marked(tokenizer, tokens[-ENDS:], coloured)


def _tokens(of: ShownSequence) -> Iterator[tuple[int, tuple[float, int, str]]]:
    """Yields each token, with what is equal in tokens of one mark; one with a target has a mark of its own."""
    for place, (token, weight) in enumerate(zip(of.ids_T, of.weights_T, strict=True)):
        target = of.targets.get(place, "")
        yield token, (weight, place if target else -1, target)


def _marked(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[tuple[int, tuple[float, int, str]]], coloured: bool
) -> Iterator[str]:
    """Yields lines of the text. Marks enclose tokens of one weight, and close at the end of each line. A mark of only
    white space names it, before the line ends by it."""
    line = ""
    for (weight, _, target), run in itertools.groupby(tokens, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        first, *rest = text.split("\n")
        if weight and not text.strip():
            first, rest = repr(text)[1:-1], [""] * len(rest)
        line += _run(first, weight, coloured, target)
        for part in rest:
            yield line
            line = _run(part, weight, coloured)
    if line:
        yield line


def _run(text: str, weight: float, coloured: bool, target: str = "") -> str:
    shown = printable(text)
    if not shown and not target:
        return ""
    number = "" if weight in (0, 1) else f"{weight:g}:"
    number += f"{target}: " if target else ""
    if coloured:
        colour = CONTEXT if weight == 0 else TRAINS if weight == 1 else OTHER_WEIGHT
        return f"{colour}{number}{shown}{RESET}"
    return shown if weight == 0 else f"{OPEN}{number}{shown}{CLOSE}"


def token_lines(tokenizer: PreTrainedTokenizerBase, of: ShownSequence, *, coloured: bool) -> Iterator[str]:
    """Yields a line for each token: its place, id, weight in the loss, and text."""
    yield f"{'place':>7} {'id':>8} {'weight':>7}  text"
    for place, (token, weight) in enumerate(zip(of.ids_T, of.weights_T, strict=True)):
        line = f"{place:>7} {token:>8} {weight:>7g}  {printable(repr(tokenizer.decode([token])))}"
        line += f"  {of.targets[place]}" if place in of.targets else ""
        yield f"{TRAINS}{line}{RESET}" if coloured and weight else line


def summary(values: Sequence[int]) -> str:
    """Returns mean, median, 95th percentile and the largest of lengths, in words. A percentile is one of the values."""
    median, most = np.percentile(values, [50, 95], method="inverted_cdf")
    mean = sum(values) / len(values)
    return f"mean {mean:,.1f}, median {median:,}, 95 % within {most:,}, longest {max(values):,}"
