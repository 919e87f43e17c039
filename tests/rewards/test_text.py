"""exact_match, regex and length against tables and formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.rewards import ExactMatchReward, LengthReward, RegexReward
from mrl.rewards.text import exact_match, length, normalize, regex


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
