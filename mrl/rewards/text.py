"""Rewards that look at the completion's text: exact match, a pattern, a length."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from mrl.config.rewards import ExactMatchReward, LengthReward, RegexReward

Prompt = str | list[dict[str, Any]]
Row = dict[str, Any]


def row_field(row: Row, name: str) -> Any:
    """Returns `row[name]`. Raises ValueError if it is null, or not there."""
    if row.get(name) is None:
        raise ValueError(f"the row has no field {name!r}, or it is null; it has {', '.join(row) or 'none'}")
    return row[name]


def normalize(text: str, *, ignore_case: bool = True, ignore_punctuation: bool = False) -> str:
    """Returns text in Unicode NFKC (full-width digits and ligatures become plain), case folded.

    White space runs become one space, and none at the ends. Ignored punctuation is the Unicode categories P*.
    """
    text = unicodedata.normalize("NFKC", text)
    if ignore_case:
        text = unicodedata.normalize("NFKC", text.casefold())
    if ignore_punctuation:
        text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
    return " ".join(text.split())


def exact_match(prompt: Prompt, completion: str, row: Row, options: ExactMatchReward) -> float:
    """Returns 1 if the completion, or what `extract` finds in it, equals the row's field after `normalize`; else 0."""
    expected = row_field(row, options.field)
    if options.extract is not None:
        found = list(re.finditer(options.extract, completion))
        if not found:
            return 0.0
        completion = (found[-1][1] if found[-1].re.groups else found[-1][0]) or ""
    how = {"ignore_case": options.ignore_case, "ignore_punctuation": options.ignore_punctuation}
    answers = expected if isinstance(expected, list) else [expected]
    return float(any(normalize(completion, **how) == normalize(str(answer), **how) for answer in answers))


def regex(prompt: Prompt, completion: str, row: Row, options: RegexReward) -> float:
    """Returns 1 if the pattern matches the whole completion (`full`) or a part of it (`search`), else 0."""
    match = re.fullmatch if options.match == "full" else re.search
    return float(match(options.pattern, completion) is not None)


def length(prompt: Prompt, completion: str, row: Row, options: LengthReward) -> float:
    """Returns 1 if minimum <= n <= maximum; outside 1 - distance / slack, at least 0.

    n counts characters or words of the text. Tokens are not offered: a reward sees text, and the punishment of overlong
    completions in tokens is the algorithm's (`mrl.algorithms.advantages`).
    """
    n = len(completion) if options.unit == "characters" else len(completion.split())
    distance = max(options.minimum - n, 0 if options.maximum is None else n - options.maximum, 0)
    if distance == 0:
        return 1.0
    return max(0.0, 1.0 - distance / options.slack) if options.slack else 0.0
