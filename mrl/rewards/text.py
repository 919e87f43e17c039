"""Rewards that look at the completion's text.

They are exact match, a pattern, a length, and answers to mathematical questions: GSM8K's numbers, and expressions
through math-verify.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import unicodedata
from decimal import Decimal
from typing import Any

from mrl.config.rewards import ExactMatchReward, GSM8KReward, LengthReward, MathReward, RegexReward
from mrl.errors import ConfigError

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


# A sign that follows a digit, a letter or a bracket is an operator; a currency sign may stand before or after the sign.
# A comma belongs to a number only where it cuts off three digits.
_SIGN = r"(?:(?<![\w)\]}.])[-+])?"
_CURRENCY = r"[$€£¥]\s?"
_DIGITS = r"(?<!\d)(?<!\d\.)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+"
NUMBER = re.compile(rf"(?P<sign>{_SIGN})(?:{_CURRENCY}(?P<inner>[-+]?))?(?P<digits>{_DIGITS})")
# `#### 72`, `#### $1,000.`, `#### 72 clips`; not the Markdown headings `#### 2. Add them` and `#### Step 2`.
MARKED = re.compile(
    rf"####\s*=?\s*\**(?P<number>[-+]?(?:{_CURRENCY}[-+]?)?(?:{_DIGITS}))(?:[.%*]*\s*$|%?\**\s+[^\d.\n]*\.?$)", re.M
)
_LATEX_SPACE = re.compile(r"\\[,!;: ]|~")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}")


def numbers(text: str) -> list[Decimal]:
    """Returns the numbers in a text, in order, with signs; units, currency and thousands' commas are left out."""
    numbers_found = []
    for match in NUMBER.finditer(text.replace("\u2212", "-")):
        sign = "-" if "-" in (match["sign"], match["inner"] or "") else ""
        numbers_found.append(Decimal(sign + match["digits"].replace(",", "")))
    return numbers_found


def boxed(text: str) -> tuple[int, str] | None:
    r"""Returns start and content of the last whole `\boxed{...}`, or None."""
    for start in reversed([m.start() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        begin = text.index("{", start) + 1
        depth = 1
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return start, text[begin:end]
    return None


def final_number(text: str, *, strict: bool = False) -> Decimal | None:
    r"""Returns the number that a worked answer ends in.

    It is the later of the last `#### N` and the last `\boxed{N}`. If there is neither, it is the last number of the
    text. With `strict` only `#### N` counts. A box without a number is no answer.
    """
    text = text.replace("\u2212", "-")
    marks = list(MARKED.finditer(text))
    box = None if strict else boxed(text)
    if box and (not marks or box[0] > marks[-1].start()):
        plain = _LATEX_TEXT.sub(" ", box[1]).replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
        inside = numbers(_LATEX_SPACE.sub("", plain))
        return inside[-1] if inside else None
    if marks:
        return numbers(marks[-1]["number"])[0]
    every = [] if strict else numbers(text)
    return every[-1] if every else None


def gsm8k(prompt: Prompt, completion: str, row: Row, options: GSM8KReward) -> float:
    """Returns 1 if `final_number` of the completion equals the number after `####` in the row's field, else 0.

    The field may be a number itself. Numbers are decimals: 18.00 is 18. Fractions and words are not numbers here;
    `math` reads fractions. Cobbe et al., 2021, "Training Verifiers to Solve Math Word Problems".
    """
    field = str(row_field(row, options.field))
    answer = field.rpartition("####")[2]
    expected = numbers(answer)
    if len(expected) != 1:
        raise ValueError(f"the row's {options.field} has no single number after ####: {answer.strip()[:60]!r}")
    return float(final_number(completion, strict=options.strict) == expected[0])


def require_math_verify(key: str) -> None:
    """Raises ConfigError naming `key` if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            key, why="the reward math needs the package math-verify", fix="install it with pip install math-verify"
        )


def math(prompt: Prompt, completion: str, row: Row, options: MathReward) -> float:
    r"""Returns 1 if math-verify finds the answers of completion and row equal, else 0.

    The row's field is an answer (`\frac{1}{2}`, `1/2`, `72`) or a solution. A solution's answer follows its last
    `####`, or is its last box or formula.

    math-verify's own time limits are off: they use SIGALRM, so they need a main thread, and they do not stop a long
    operation on big integers. The pool's timeout kills the process instead.
    """
    math_verify = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    answer = str(row_field(row, options.field)).rpartition("####")[2].strip()
    if "$" not in answer and "\\boxed" not in answer and "\\[" not in answer and "\\(" not in answer:
        answer = f"${answer}$"
    gold = math_verify.parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no answer in the row's {options.field}: {answer[:60]!r}")
    found = math_verify.parse(completion, parsing_timeout=None)
    return float(math_verify.verify(gold, found, timeout_seconds=None))
