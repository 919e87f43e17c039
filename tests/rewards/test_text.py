"""exact_match, regex and length against tables and formulas; GSM8K's numbers and math-verify on rows and forms of models."""

from __future__ import annotations

import sys
import threading
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.rewards import ExactMatchReward, GSM8KReward, LengthReward, MathReward, RegexReward
from mrl.errors import ConfigError
from mrl.rewards.text import (
    boxed,
    exact_match,
    final_number,
    gsm8k,
    length,
    math,
    normalize,
    regex,
    require_math_verify,
)


@pytest.mark.parametrize(
    ("completion", "answer", "options", "expected"),
    [
        ("Paris", "Paris", {}, 1),
        ("  paris\n", "Paris", {}, 1),
        ("paris", "Paris", {"ignore_case": False}, 0),
        ("New\n  York", "new york", {}, 1),
        ("Paris.", "Paris", {}, 0),
        ("“Paris”.", "Paris", {"ignore_punctuation": True}, 1),
        ("１２", "12", {}, 1),
        ("STRASSE", "straße", {}, 1),
        ("7", 7, {}, 1),
        ("no", ["yes", "No"], {}, 1),
        ("maybe", ["yes", "No"], {}, 0),
        ("", "x", {}, 0),
        ("<a>3</a> or <a>4</a>", "4", {"extract": "<a>(.*?)</a>"}, 1),
        ("<a>3</a> or <a>4</a>", "3", {"extract": "<a>(.*?)</a>"}, 0),
        ("it is 12 or 13", "13", {"extract": r"\d+"}, 1),
        ("nothing", "", {"extract": r"\d+"}, 0),
        ("ab", "", {"extract": "a(x)?b"}, 1),
    ],
)
def test_exact_match(completion, answer, options, expected):
    assert exact_match("q", completion, {"answer": answer}, ExactMatchReward(**options)) == expected


def test_exact_match_names_the_fields_of_a_row_without_its_own():
    with pytest.raises(ValueError, match="no field 'target', or it is null; it has answer, id"):
        exact_match("q", "a", {"answer": "a", "id": 1}, ExactMatchReward(field="target"))


@given(st.text())
def test_normalize_changes_nothing_the_second_time(text):
    once = normalize(text)
    assert normalize(once) == once
    assert once == once.strip() and "  " not in once


@pytest.mark.parametrize(
    ("pattern", "match", "completion", "expected"),
    [
        (r"<think>.*</think>\d+", "full", "<think>a</think>5", 1),
        (r"<think>.*</think>\d+", "full", "<think>a</think>5!", 0),
        (r"<think>.*</think>\d+", "full", "<think>a\nb</think>5", 0),
        (r"(?s)<think>.*</think>\d+", "full", "<think>a\nb</think>5", 1),
        (r"\d+", "search", "it is 5!", 1),
        (r"\d+", "search", "five", 0),
        ("", "search", "", 1),
    ],
)
def test_regex(pattern, match, completion, expected):
    assert regex("q", completion, {}, RegexReward(pattern=pattern, match=match)) == expected


@given(st.text(max_size=30), st.integers(0, 20), st.one_of(st.none(), st.integers(0, 20)), st.integers(0, 10))
def test_length_is_a_trapezium(text, minimum, more, slack):
    maximum = None if more is None else minimum + more
    value = length("q", text, {}, LengthReward(minimum=minimum, maximum=maximum, slack=slack))
    n = len(text)
    if n >= minimum and (maximum is None or n <= maximum):
        assert value == 1
    else:
        beyond = minimum - n if n < minimum else n - maximum
        assert value == (0 if beyond >= slack else pytest.approx((slack - beyond) / slack))


def test_length_in_words():
    options = LengthReward(unit="words", maximum=3, slack=4)
    assert length("q", "one two\nthree", {}, options) == 1
    assert length("q", "one two three four", {}, options) == 0.75


# --------------------------------------------------------------------------------------------------------- gsm8k, math


# Rows of GSM8K (Cobbe et al., 2021; MIT licence), their answers whole.
ROWS = [
    (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether in "
        "April and May.\n#### 72",
        "72",
    ),
    (
        "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = "
        "$<<0.2*50=10>>10.\n#### 10",
        "10",
    ),
]


@pytest.mark.parametrize(("answer", "number"), ROWS)
@pytest.mark.parametrize(
    "form",
    ["{whole}", "The answer is {n}.", "so ${n}.00", "**{n}**", "#### {n}", "####{n} clips", r"$$\boxed{{{n}}}$$", r"\boxed{{\text{{n=}} {n}\ \text{{m}}}}"],
)  # fmt: skip
def test_gsm8k_rows(answer, number, form):
    row = {"question": "?", "answer": answer}
    assert gsm8k("?", form.format(whole=answer, n=number), row, GSM8KReward()) == 1
    assert gsm8k("?", form.format(whole=answer + "1", n=number + "1"), row, GSM8KReward()) == 0


@pytest.mark.parametrize(
    ("text", "number", "strict"),
    [
        ("#### 1,234,567", "1234567", "1234567"),
        ("#### $1,234.50.", "1234.50", "1234.50"),
        ("#### -5", "-5", "-5"),
        ("#### \u22125", "-5", "-5"),
        ("#### -$5", "-5", "-5"),
        ("#### $-5", "-5", "-5"),
        ("#### **72**", "72", "72"),
        ("#### 20%", "20", "20"),
        ("#### 10 apples.", "10", "10"),
        ("#### 5\nso it is 9", "5", "5"),
        ("#### 5\nno, wait\n#### 6", "6", "6"),
        (r"#### 5, that is \boxed{6}", "6", None),
        ("\\boxed{6}\n#### 5", "5", "5"),
        ("#### 1. Add\n2 + 3 = 5\n#### 2. Double\n2 * 5 is 10, the answer", "10", None),
        ("#### Step 2\nThe total is 7", "7", None),
        ("#### unknown", None, None),
        (r"\boxed{\frac{3}{4}} of $12 is \boxed{\$1{,}009.5\text{ dollars}}", "1009.5", None),
        (r"\boxed{unclosed 4 and \boxed{5}", "5", None),
        (r"\boxed{none} though 4 came up", None, None),
        ("between 10-15", "15", None),
        ("costs 3,4 and 5", "5", None),
        ("18.", "18", None),
        ("it is...18", "18", None),
        ("about .5", "0.5", None),
        ("x=-7", "-7", None),
        ("5-3", "3", None),
        ("(-3)", "-3", None),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_final_number(text, number, strict):
    assert final_number(text) == (None if number is None else Decimal(number))
    assert final_number(text, strict=True) == (None if strict is None else Decimal(strict))


@given(st.decimals(-(10**9), 10**9, places=2))
def test_every_number_is_found_in_every_form(number):
    for text in (f"{number}", f"{number:,}", f"#### {number:,}.", rf"\boxed{{{number}}}", f"it is ${number}, I think"):
        assert final_number(text) == number


@given(st.text(alphabet="#\\boxed{} $-+.,0123456789\n%"))
def test_any_text_has_a_number_or_none(text):
    found = final_number(text)
    assert found is None or found.is_finite()


@pytest.mark.parametrize("answer", ["no number", "#### ", "#### 3 or 4", "7 #### none"])
def test_a_row_without_an_answer_is_an_error(answer):
    with pytest.raises(ValueError, match="no single number"):
        gsm8k("?", "5", {"answer": answer}, GSM8KReward())


@pytest.mark.parametrize("answer", [72, "72", "72.0", 72.0])
def test_the_row_may_hold_the_number_alone(answer):
    assert gsm8k("?", "it is 72", {"target": answer}, GSM8KReward(field="target")) == 1


def test_boxed_takes_the_last_whole_box():
    assert boxed(r"\boxed{1} \boxed{\frac{1}{2}} x") == (10, r"\frac{1}{2}")
    assert boxed("none") is None


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        (r"\frac{1}{2}", "The answer is $0.5$.", 1),
        ("1/2", r"\boxed{\frac12}", 1),
        ("72", "so it is 72", 1),
        ("some text\n#### 1,000", r"\boxed{1000}", 1),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("x^2+2x+1", "$(x+1)^2$", 1),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        (r"It follows that $x = 4$, so \boxed{4}", r"\boxed{4}", 1),
        (r"\text{Monday}", r"\boxed{\text{Monday}}", 1),
        ("-5", r"\boxed{5}", 0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0),
        ("72", "no idea", 0),
        ("72", "", 0),
        ("3", r"\boxed{3", 0),
    ],
)
def test_math(answer, completion, expected):
    assert math("?", completion, {"answer": answer}, MathReward()) == expected


def test_math_needs_no_signals():
    """math-verify's own limits use SIGALRM and fail in a thread; they are off."""
    values = []
    thread = threading.Thread(target=lambda: values.append(math("?", "$4$", {"answer": "4"}, MathReward())))
    thread.start()
    thread.join()
    assert values == [1.0]


def test_math_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="no answer in the row's answer"):
        math("?", "3", {"answer": ""}, MathReward())


def test_math_verify_missing_names_the_key(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    with pytest.raises(ConfigError, match=r"^rewards.functions\[0\].name: .*pip install math-verify$"):
        require_math_verify("rewards.functions[0].name")
