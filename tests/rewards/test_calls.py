"""What functions are given and may return, by the names of their parameters: mrl's own forms, verl's and TRL's."""

from __future__ import annotations

import fractions
import functools
import re

import numpy as np
import pytest

from mrl.rewards.calls import MissingFields, Position, RewardCall, Sample, TrainerState

AT = Position(step=8, made=7, total=40)
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train"},
}
MESSAGES = [{"role": "user", "content": "6*7?"}]
ANSWER = [{"role": "assistant", "content": "42"}]


def sample(completion="42", prompt="6*7?", row=None, **fields):
    return Sample(prompt, completion, {"answer": "42"} if row is None else row, "train.jsonl:1", **fields)


PAIR = [sample(tokens=(4, 2)), sample("43", finished=False, tokens=(4, 3))]


def given(function, samples=None, position=AT):
    """What `function`, which returns its arguments, is given."""
    return function(**RewardCall(function).arguments([sample()] if samples is None else samples, position))


class Judge:
    def __call__(self, prompt, completion, row):
        return completion


@pytest.mark.parametrize(
    ("function", "samples", "expected"),
    [
        (lambda prompt, completion, row: (prompt, completion, row), None, ("6*7?", "42", {"answer": "42"})),
        (lambda row, completion: (completion, row), None, ("42", {"answer": "42"})),
        (lambda *, completion, scale=2, **kwargs: (completion, scale, kwargs), None, ("42", 2, {})),
        (lambda completion, tokens, finish_reason, step: (completion, tokens, finish_reason, step), PAIR[1:], ("43", [4, 3], "length", 8)),
        (functools.partial(lambda completion, scale: (completion, scale), scale=3), None, ("42", 3)),
        (Judge(), None, "42"),
        # the samples of a prompt, and all
        (lambda prompt, completions, row, finish_reasons: (prompt, completions, row, finish_reasons), PAIR,
         ("6*7?", ["42", "43"], {"answer": "42"}, ["stop", "length"])),
        (lambda prompts, completions, rows, tokens, step: (prompts, completions, rows, tokens, step), PAIR,
         (["6*7?"] * 2, ["42", "43"], [{"answer": "42"}] * 2, [[4, 2], [4, 3]], 8)),
        (lambda completions, rows: completions, [sample(prompt=MESSAGES)], ["42"]),
        # verl's
        (lambda data_source, solution_str, ground_truth, extra_info=None: (data_source, solution_str, ground_truth, extra_info),
         [sample(row=VERL_ROW, turns=2)],
         ("openai/gsm8k", "42", "42", {"split": "train", "num_turns": 2, "rollout_reward_scores": {}})),
        (lambda solution_str, ground_truth, **kwargs: (solution_str, ground_truth, kwargs), [sample(row={"ground_truth": 7})], ("42", 7, {})),
        (lambda solution_str, data_source="none": (solution_str, data_source), None, ("42", "none")),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: (data_sources, solution_strs, ground_truths, len(extra_infos)),
         [sample(row=VERL_ROW)] * 2, (["openai/gsm8k"] * 2, ["42"] * 2, ["42"] * 2, 2)),
        # TRL's
        (lambda prompts, completions, **kwargs: (prompts, completions, kwargs), PAIR,
         (["6*7?"] * 2, ["42", "43"],
          {"answer": ["42", "42"], "completion_ids": [[4, 2], [4, 3]], "trainer_state": TrainerState(7, 40)})),
        (lambda completions, **kwargs: (completions, kwargs["prompts"]), [sample(prompt=MESSAGES)], ([ANSWER], [MESSAGES])),
        (lambda completions, **kwargs: completions, [sample(prompt=MESSAGES, conversation=[*ANSWER, *MESSAGES, *ANSWER])], [[*ANSWER, *MESSAGES, *ANSWER]]),
        (lambda completions, answer, trainer_state: (completions, answer, trainer_state.global_step), PAIR, (["42", "43"], ["42"] * 2, 7)),
        (lambda prompts, completions, completion_ids: completion_ids, PAIR, [[4, 2], [4, 3]]),
        (lambda completions, log_metric=None, finish_reasons=None: (log_metric, finish_reasons), PAIR, (None, ["stop", "length"])),
        (lambda completions, step: step, [sample(row={"step": "a column"})], ["a column"]),
        (lambda completions, hint, **kwargs: (hint, sorted(kwargs)), [sample(row={"hint": 1}), sample(row={"completion": "x"})],
         ([1, None], ["completion_ids", "prompts", "trainer_state"])),
    ],
)  # fmt: skip
def test_a_function_gets_what_it_names(function, samples, expected):
    assert given(function, samples) == expected


@pytest.mark.parametrize(
    ("function", "row", "message"),
    [
        (lambda data_source, solution_str, ground_truth: 0, {"ground_truth": 1}, "the row has no field 'data_source'; add it, rename one with data.columns, or give a default; it has ground_truth"),
        (lambda solution_str, ground_truth: 0, {"answer": 1}, "the row has no ground_truth, nor reward_model.ground_truth; rename a field with data.columns"),
        (lambda completions, solution: 0, {"answer": 1}, "the rows have no field 'solution', which the function names; add it, rename one with data.columns, or give a default; they have answer"),
    ],
)  # fmt: skip
def test_a_row_that_lacks_what_a_function_names(function, row, message):
    with pytest.raises(MissingFields, match=re.escape(message)):
        given(function, [sample(row=row)])


ONE, VERL, TRL, GROUP = (
    RewardCall(f)
    for f in (lambda completion: 0, lambda solution_str: 0, lambda completions: 0, lambda prompt, completions: 0)
)


@pytest.mark.parametrize(
    ("call", "returned", "values"),
    [
        (ONE, True, (1.0,)),
        (ONE, fractions.Fraction(1, 2), (0.5,)),
        (ONE, np.array(3), (3.0,)),
        (VERL, {"score": 0.5, "acc": True}, (0.5,)),
        (TRL, [1, None], (1.0, 0.0)),  # None: the function has nothing to say of a sample
        (TRL, np.array([1, 2]), (1.0, 2.0)),
        (GROUP, (1, 2), (1.0, 2.0)),
    ],
)
def test_what_a_function_may_return(call, returned, values):
    assert call.values(returned, len(values)) == values


@pytest.mark.parametrize(
    ("call", "returned", "message"),
    [
        (ONE, {"score": 1}, r"returned \{'score': 1\} \(dict\), which is no number"),
        (ONE, "0.5", r"returned '0.5' \(str\), which is no number"),
        (ONE, float("inf"), "returned inf, which is not finite"),
        (ONE, np.ones(2), r"returned array\(\[1., 1.\]\) \(ndarray\)"),
        (VERL, {"acc": 1}, "returned a mapping without score; it has acc"),
        (TRL, [1], "returned 1 values for 2 completions"),
        (TRL, 0.5, r"returned 0.5 \(float\), which is no list of numbers, one for each of 2 completions"),
        (TRL, [1, float("nan")], "returned nan as value 1, which is not finite"),
        (GROUP, [1, None], r"returned None \(NoneType\) as value 1, which is no number"),
    ],
)
def test_what_a_function_may_not_return(call, returned, message):
    with pytest.raises(ValueError, match=message):
        call.values(returned, 2)


def test_scopes_and_tokens_are_known():
    calls = [ONE, GROUP, TRL, RewardCall(lambda completions, rows: 0), RewardCall(lambda completions, **kwargs: 0)]
    assert [call.scope for call in calls] == ["sample", "group", "batch", "batch", "batch"]
    assert [call.needs_tokens for call in calls] == [False, False, False, False, True]
