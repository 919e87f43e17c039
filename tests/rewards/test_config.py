"""The section `rewards`: what is accepted, and the one line of each mistake."""

from __future__ import annotations

import re

import pytest

from mrl.config.load import to_dict
from mrl.config.rewards import NAMED, CodeReward, FunctionReward, GSM8KReward, RegexReward, label_of, parse_rewards
from mrl.errors import ConfigError
from mrl.rewards.functions import NAMED_FUNCTIONS

FULL = {
    "functions": [
        {"name": "gsm8k"},
        {"name": "regex", "pattern": ".*", "weight": 0.1, "label": "format"},
        {"function": "a/b.py:score", "weight": -2},
    ],
    "timeout_s": 3,
    "workers": 2,
    "concurrency": 4,
    "on_error": "zero",
}


def test_entries_become_typed_rewards():
    config = parse_rewards(FULL)
    assert config.functions == (
        GSM8KReward(),
        RegexReward(pattern=".*", weight=0.1, label="format"),
        FunctionReward(function="a/b.py:score", weight=-2.0),
    )
    assert (config.timeout_s, config.workers, config.concurrency, config.on_error) == (3.0, 2, 4, "zero")
    assert [label_of(f) for f in config.functions] == ["gsm8k", "format", "score"]


def test_plain_data_of_a_config_gives_it_again():
    config = parse_rewards(FULL)
    assert parse_rewards(to_dict(config)) == config


def test_every_named_reward_has_a_function():
    assert set(NAMED) == set(NAMED_FUNCTIONS)
    assert all(section.__dataclass_fields__["name"].default == name for name, section in NAMED.items())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "rewards: value null is null; give a mapping"),
        ({}, "rewards.functions: value null is no list of rewards"),
        ({"functions": []}, "rewards.functions: value [] is no list of rewards; give a list"),
        ({"functions": ["gsm8k"]}, 'rewards.functions[0]: value "gsm8k" names no reward'),
        ({"functions": [{"weight": 1}]}, "rewards.functions[0]: value {\"weight\": 1} names no reward, or two; give {name: NAME} of exact_match"),
        ({"functions": [{"name": "gsm8k", "function": "a.py:f"}]}, "names no reward, or two"),
        ({"functions": [{"name": "gsmk8"}]}, 'rewards.functions[0].name: value "gsmk8" is no named reward; give one of exact_match'),
        ({"functions": [{"name": "gsm8k", "feild": "x"}]}, "rewards.functions[0].feild: value \"x\" is given to an unknown key; did you mean rewards.functions[0].field?"),
        ({"functions": [{"function": "a.py:f", "time": 3}]}, "rewards.functions[0].time: value 3 is given to an unknown key"),
        ({"functions": [{"name": "regex"}]}, "rewards.functions[0].pattern: is missing and has no default"),
        ({"functions": [{"name": "regex", "pattern": "("}]}, 'rewards.functions[0].pattern: value "(" is no regex: missing )'),
        ({"functions": [{"name": "exact_match", "extract": "["}]}, "rewards.functions[0].extract: value"),
        ({"functions": [{"name": "code", "total_s": 10}]}, "rewards.functions[0].total_s: value 10.0 does not leave time before rewards.timeout_s 10.0"),
        ({"functions": [{"function": "score"}]}, 'rewards.functions[0].function: value "score" is not path.py:name'),
        ({"functions": [{"name": "length"}]}, "rewards.functions[0]: has no bound, or a maximum"),
        ({"functions": [{"name": "length", "minimum": 3, "maximum": 2}]}, "rewards.functions[0]: has no bound, or a maximum"),
        ({"functions": [{"name": "gsm8k"}, {"name": "gsm8k"}]}, 'rewards.functions[1].label: value "gsm8k" is taken'),
        ({"functions": [{"name": "gsm8k", "label": "mean"}]}, 'rewards.functions[0].label: value "mean" is taken'),
        ({"functions": [{"name": "gsm8k"}], "timeout": 3}, "rewards.timeout: value 3 is given to an unknown key; did you mean rewards.timeout_s?"),
    ],
)  # fmt: skip
def test_mistakes(raw, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_rewards(raw)
    assert "\n" not in str(caught.value)


def test_defaults_fit_together():
    assert parse_rewards({"functions": [{"name": "code"}]}).functions == (CodeReward(),)
