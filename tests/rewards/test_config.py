"""The section `rewards` and users' functions: what is accepted, what is loaded, and the one line of each mistake."""

from __future__ import annotations

import re
import sys

import pytest

from mrl.config.load import to_dict
from mrl.config.rewards import (
    NAMED,
    CodeReward,
    FunctionReward,
    GSM8KReward,
    LengthReward,
    RegexReward,
    label_of,
    parse_rewards,
)
from mrl.errors import ConfigError
from mrl.rewards.functions import NAMED_FUNCTIONS, describe, is_async, load_function, load_reward
from tests.rewards.reward_files import write_functions

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


# -------------------------------------------------------------------------------------------------- functions of users


KEY = "rewards.functions[2].function"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return write_functions(tmp_path)


def test_functions_of_a_file_share_its_module(path):
    size, wider = load_function(f"{path}:size", KEY), load_function(f"{path}:wider", KEY)
    assert size.function("q", "abc", {}) == 3 and wider.function("q", "a", {}) == 0.5
    assert size.function.__globals__ is wider.function.__globals__


def test_async_functions_are_known(path):
    known = {
        name: is_async(load_function(f"{path}:{name}", KEY).function) for name in ("size", "async_script", "judge")
    }
    assert known == {"size": False, "async_script": True, "judge": True}


def test_named_rewards_take_their_options():
    function = load_reward(LengthReward(maximum=2), KEY).function
    assert function("q", "ab", {}) == 1 and function("q", "abc", {}) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sizes", "sizes: the file has no function sizes"),
        ("number", "number: the file has no function number"),
        ("places", "places(p, c, r) has no parameter for the completion; write def places(prompt, completion, row), or give it the parameters of verl"),
        ("more", "more(completion, answer) needs answer, which nothing is known for; give a default, or take of prompt, completion, row"),
        ("by_place", "by_place(completion, /) takes parameters by place alone; remove the /"),
        ("max", "max has parameters that cannot be read; write def max(prompt"),
    ],
)  # fmt: skip
def test_a_wrong_function(path, name, message):
    with pytest.raises(ConfigError, match=re.escape(message.format(path=path))) as caught:
        load_function(f"{path}:{name}", KEY)
    assert str(caught.value).startswith(f"{KEY}: {path}:{name}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; give path.py:name"),
        ("def f(:\n", "SyntaxError: invalid syntax (bad.py, line 1) while loading"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package' (bad.py:1) while loading"),
        ("x = 1\nraise SystemExit(3)\n", "SystemExit: 3 (bad.py:2) while loading"),
    ],
)
def test_a_file_that_does_not_load(path, tmp_path, text, message):
    bad = tmp_path / "bad.py"
    if text is not None:
        bad.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_reward(FunctionReward(function=f"{bad}:f"), "rewards.functions[2]")
    assert str(caught.value).startswith(f"{KEY}: {bad}:f: ") and "\n" not in str(caught.value)


def test_a_file_of_another_kind(path, tmp_path):
    (tmp_path / "rew.txt").write_text("def f(completion): return 1.0")
    with pytest.raises(ConfigError, match="rew.txt:f: rew.txt is no Python file; give path.py:name"):
        load_function(f"{tmp_path}/rew.txt:f", KEY)


def test_an_error_is_one_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b" and len(describe(ValueError("x" * 10_000))) < 400
