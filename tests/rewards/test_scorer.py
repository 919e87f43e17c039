"""Several rewards with weights: totals, parts, metrics, and what happens to faults."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.rewards import parse_rewards
from mrl.errors import RewardError, UserError
from mrl.rewards.scorer import Sample, Scorer, Scores, faults_in_words, metrics
from tests.rewards.kit import write_functions

ANSWER = "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n#### 10"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_functions(tmp_path_factory.mktemp("functions"))


def samples(*completions):
    return [Sample("q", c, {"answer": ANSWER}, f"train.jsonl:{i + 1}") for i, c in enumerate(completions)]


def scorer(*functions, **keys):
    return Scorer(parse_rewards({"functions": list(functions), "workers": 2, "timeout_s": 1, **keys}))


def test_the_total_is_the_weighted_sum(path):
    functions = (
        {"name": "gsm8k", "weight": 2},
        {"name": "regex", "pattern": "#### .*", "weight": -0.5, "label": "form"},
        {"function": f"{path}:size", "weight": 0},
    )
    with scorer(*functions) as scoring:
        scores = scoring.score(samples("#### 10", "it is 10", "#### 11"))
        assert scoring.score([]) == Scores((), {"gsm8k": (), "form": (), "size": ()})
    assert scores.parts == {"gsm8k": (1.0, 1.0, 0.0), "form": (1.0, 0.0, 1.0), "size": (7.0, 8.0, 7.0)}
    assert scores.totals == (1.5, 2.0, -0.5) and scores.faults == ()


@pytest.mark.parametrize(
    ("completion", "fault"),
    [
        ("raise x", r"raised KeyError: 'x' \(my_rewards.py:\d+\)"),
        ("give float('nan')", "returned nan, which is not finite"),
        ("hang", "took longer than 1 s"),
        ("exit", r"ended its process \(exit status 7\)"),
    ],
)
def test_a_fault_stops_or_counts_as_zero(path, completion, fault):
    functions = ({"name": "gsm8k"}, {"function": f"{path}:script"})
    rows = samples("give 1", "give 10", completion, "give None")
    expected = rf"rewards.functions\[1\].function: {re.escape(path)}:script: row train.jsonl:3: {fault}"
    with (
        scorer(*functions) as scoring,
        pytest.raises(RewardError, match=f"^{expected}; correct it, or set rewards.on_error: zero$"),
    ):
        scoring.score(rows)
    with scorer(*functions, on_error="zero") as scoring:
        scores = scoring.score(rows)
    assert scores.parts["script"] == (1.0, 10.0, 0.0, 0.0) and scores.totals == (1.0, 11.0, 0.0, 0.0)
    assert len(scores.faults) == 2 and re.fullmatch(f"{expected}; counts as 0", scores.faults[0])
    assert issubclass(RewardError, UserError)


def test_many_faults_are_three_lines_and_a_count():
    faults = [f"row {i}: bad; counts as 0" for i in range(1024)]
    assert faults_in_words(faults[:3]) == faults[:3] and faults_in_words(()) == []
    assert faults_in_words(faults[:4])[3] == "and 1 more fault of rewards, which counts as 0"
    assert faults_in_words(faults) == [*faults[:3], "and 1,021 more faults of rewards, which count as 0"]


def test_a_named_reward_with_a_bad_row_names_both():
    message = (
        r"^rewards.functions\[0\]: exact_match: row train.jsonl:1: raised ValueError: the row has no field 'target'"
    )
    with scorer({"name": "exact_match", "field": "target"}) as scoring, pytest.raises(RewardError, match=message):
        scoring.score(samples("x"))


def test_a_completion_that_makes_the_comparison_hang_is_wrong_and_noted():
    with scorer({"name": "regex", "pattern": "(a+)+b"}) as scoring:
        scores = scoring.score(samples("aab", "a" * 64))
    assert scores.totals == (1.0, 0.0)
    assert scores.faults == ("rewards.functions[0]: regex: row train.jsonl:2: took longer than 1 s; counts as 0",)


def test_math_in_the_pool():
    pytest.importorskip("math_verify")
    with scorer({"name": "math"}, timeout_s=20) as scoring:
        assert scoring.score(samples(r"\boxed{10}", "$20/2$", "11")).totals == (1.0, 1.0, 0.0)


def test_code_in_the_pool():
    row = {"tests": ["assert f(2) == 4", "assert f(3) == 6"]}
    with scorer({"name": "code", "total_s": 8}, timeout_s=10) as scoring:
        texts = [
            "```python\nf = lambda x: 2 * x\n```",
            "```python\nf = lambda x: x * x\n```",
            "```python\nwhile True: pass\n```",
        ]
        assert scoring.score([Sample("q", t, row, "f:1") for t in texts]).totals == (1.0, 0.5, 0.0)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=20))
def test_metrics(values):
    a, b = (tuple(v) for v in zip(*values, strict=True))
    got = metrics(Scores(a, {"a": a, "b": b}, ("one",)))
    expected = {"reward/faults": 1.0}
    for name, column in (("reward", a), ("reward/a", a), ("reward/b", b)):
        expected |= {f"{name}/mean": np.mean(column), f"{name}/std": np.std(column)}
    assert got.keys() == expected.keys()
    assert all(math.isclose(got[k], expected[k], rel_tol=1e-6, abs_tol=1e-6) for k in got)
    assert metrics(Scores((), {})) == {}
