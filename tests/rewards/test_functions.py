"""A user's function: what is loaded, and the one line of each mistake."""

from __future__ import annotations

import re
import sys

import pytest

from mrl.config.rewards import FunctionReward, LengthReward
from mrl.errors import ConfigError
from mrl.rewards.functions import describe, is_async, load_function, load_reward
from tests.rewards.reward_files import write_functions

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
