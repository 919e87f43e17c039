"""The ends of an answer's steps, in tokens: found in the rendered text by its characters, never by guessing.

A step ends with the last token that holds nothing of the next one. If a separator shares a token with the next step,
the step ends before that token. The last step ends at the token that scores the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mrl.data.encode import Encoder
from mrl.data.files import BadRow
from mrl.data.formats import Chat, Text
from mrl.errors import DataError, ModelError

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
