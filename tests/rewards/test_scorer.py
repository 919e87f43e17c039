"""Several rewards with weights: totals, parts, metrics, and what happens to faults."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.rewards import parse_rewards
from mrl.errors import ConfigError, RewardError, UserError
from mrl.rewards.calls import Position, Sample
from mrl.rewards.functions import check_rewards
from mrl.rewards.scorer import Scorer, Scores, faults_in_words, metrics
from tests.rewards.reward_files import write_functions

ANSWER = "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n#### 10"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_functions(tmp_path_factory.mktemp("functions"))


def samples(*completions):
    return [Sample("q", c, {"answer": ANSWER}, f"train.jsonl:{i + 1}") for i, c in enumerate(completions)]


def scorer(*functions, **keys):
    return contextlib.closing(
        Scorer(parse_rewards({"functions": list(functions), "workers": 1, "timeout_s": 1, **keys}))
    )


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


def test_a_fault_stops_or_counts_as_zero(path):
    functions = ({"name": "gsm8k"}, {"function": f"{path}:script"})
    rows = samples("give 1", "give 10", "hang", "give None")
    expected = rf"rewards.functions\[1\].function: {re.escape(path)}:script: row train.jsonl:3: took longer than 1 s"
    advice = "correct it, raise rewards.timeout_s, or set rewards.on_error: zero"
    with scorer(*functions) as scoring, pytest.raises(RewardError, match=f"^{expected}; {advice}$"):
        scoring.score(rows)
    with scorer(*functions, on_error="zero") as scoring:
        scores = scoring.score(rows)
    assert scores.parts["script"] == (1.0, 10.0, 0.0, 0.0) and scores.totals == (1.0, 11.0, 0.0, 0.0)
    assert len(scores.faults) == 2 and re.fullmatch(f"{expected}; counts as 0", scores.faults[0])
    assert issubclass(RewardError, UserError)


def test_keys_of_the_pool_reach_it(path):
    with scorer({"function": f"{path}:script"}, retries=2, retry_wait_s=30.0, concurrency=3) as scoring:
        assert (scoring._pool._retries.count, scoring._pool._retries.wait_s, scoring._pool._concurrency) == (2, 30.0, 3)


def test_a_fault_names_the_users_own_line_and_keeps_traceback_and_completion(path, tmp_path):
    before, _, _ = pathlib.Path(path).read_text().partition("# the line that a user can mend")
    line = len(before.splitlines())
    with scorer({"function": f"{path}:parses"}, on_error="zero") as scoring:
        [fault] = scoring.score(samples("{}")).faults
    assert fault.endswith(f"raised KeyError: 'score' (my_rewards.py:{line}); counts as 0")
    config = parse_rewards({"functions": [{"function": f"{path}:parses"}], "workers": 1})
    kept = tmp_path / "failed" / "reward_step_12.txt"
    with contextlib.closing(Scorer(config, reports=kept.parent)) as scoring, pytest.raises(RewardError) as caught:
        scoring.score(samples('{"score": 1}', "{no JSON"), Position(step=12))
    said = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert f"row train.jsonl:2: raised JSONDecodeError: {said} (my_rewards.py:{line})" in str(caught.value)
    assert str(caught.value).endswith(f"; its traceback and the completion are in {kept}")
    text = kept.read_text()
    assert "{no JSON" in text and f'my_rewards.py", line {line}, in parses' in text and "json/decoder.py" in text
    assert "worker.py" not in text


def test_functions_of_all_forms_are_added_up(path):
    functions = [{"function": f"{path}:{name}"} for name in ("of_verl", "of_trl", "of_group", "size")]
    rows = [
        Sample("q", c, {"data_source": "x", "ground_truth": "bb", "value": i}, "f:1", group=i // 2)
        for i, c in enumerate(("a", "bb", "bb", "a"))
    ]
    with scorer(*functions) as scoring:
        scores = scoring.score(rows)
        assert scoring.score([]).totals == ()
    assert (scores.parts["of_verl"], scores.parts["of_trl"]) == ((0, 1, 1, 0), (1, 3, 4, 4))
    assert (scores.parts["of_group"], scores.parts["size"]) == ((0, 1, 1, 0), (1, 2, 2, 1))


def test_a_fault_of_a_batch_names_its_first_row_and_its_size(path):
    with scorer({"function": f"{path}:of_trl"}, on_error="zero") as scoring:
        scores = scoring.score(samples("a", "b"))
    assert scores.totals == (0, 0)
    assert (
        "row train.jsonl:1 and 1 more samples: raised MissingFields: the rows have no field 'value'" in scores.faults[0]
    )


def test_a_field_that_a_first_row_lacks_is_said_before_anything_is_scored(path):
    """Of any of the sources."""
    functions = [{"function": f"{path}:{name}"} for name in ("of_verl", "of_trl")]
    first = {"data_source": "x", "ground_truth": "bb", "value": 1}
    for lacking, says in (
        ("value", f"rewards.functions[1].function: {path}:of_trl: row f:2: the rows have no field 'value', which the function names"),
        ("ground_truth", f"rewards.functions[0].function: {path}:of_verl: row f:2: the row has no ground_truth"),
    ):  # fmt: skip
        row = {name: value for name, value in first.items() if name != lacking}
        rows = [Sample("", "", first, "f:1"), Sample("", "", row, "f:2")]
        with pytest.raises(ConfigError, match=re.escape(says)):
            Scorer(parse_rewards({"functions": functions, "workers": 1}), first=rows)
    lenient = parse_rewards({"functions": functions, "workers": 2, "on_error": "zero"})
    with contextlib.closing(Scorer(lenient, first=rows)) as scoring:
        assert len(scoring._pool.pids) == 2


@pytest.mark.parametrize("field", ["tests", "hint"])
def test_a_field_of_a_shipped_reward_that_a_first_row_lacks(field):
    config = parse_rewards({"functions": [{"name": "gsm8k", "field": field}], "workers": 1})
    line = (
        f'rewards.functions[0].field: value "{field}" is the field that gsm8k reads, and it is missing or null in row '
        "f:1, which has prompt, answer, hint; name one of them"
    )
    with pytest.raises(ConfigError, match=re.escape(line)):
        check_rewards(config, [({"prompt": "1+1?", "answer": "2", "hint": None}, "f:1")])


def test_many_faults_are_three_lines_and_a_count():
    faults = [f"row {i}: bad; counts as 0" for i in range(1024)]
    assert faults_in_words(faults[:3]) == faults[:3] and faults_in_words(()) == []
    assert faults_in_words(faults[:4])[3] == "other faults of rewards, each of which counts as 0: 1"
    assert faults_in_words(faults) == [*faults[:3], "other faults of rewards, each of which counts as 0: 1,021"]


def test_a_completion_that_makes_the_comparison_hang_is_wrong_and_noted():
    with scorer({"name": "regex", "pattern": "(a+)+b"}) as scoring:
        scores = scoring.score(samples("aab", "a" * 64))
    assert scores.totals == (1.0, 0.0)
    assert scores.faults == ("rewards.functions[0]: regex: row train.jsonl:2: took longer than 1 s; counts as 0",)


@pytest.mark.slow
def test_code_in_the_pool():
    row = {"tests": ["assert f(2) == 4", "assert f(3) == 6"]}
    with scorer({"name": "code", "time_s": 1}, timeout_s=30) as scoring:
        programs = ("f = lambda x: 2 * x", "f = lambda x: x * x", "while True: pass")
        rows = [Sample("q", f"```python\n{program}\n```", row, "f:1") for program in programs]
        assert scoring.score(rows).totals == (1.0, 0.5, 0.0)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=20))
def test_metrics(values):
    a, b = (tuple(v) for v in zip(*values, strict=True))
    got = metrics(Scores(a, {"a": a, "b": b}, ("one",)))
    expected = {"reward/faults": 1.0}
    for name, column in (("reward", a), ("reward/a", a), ("reward/b", b)):
        expected |= {f"{name}/mean": np.mean(column), f"{name}/std": np.std(column)}
    expected |= {"reward/min": min(a), "reward/max": max(a)}
    assert got.keys() == expected.keys()
    assert all(math.isclose(got[k], expected[k], rel_tol=1e-6, abs_tol=1e-6) for k in got)
    assert metrics(Scores((), {})) == {}
