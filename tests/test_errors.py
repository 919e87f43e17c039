"""Errors with fields: the line that they make, how they show a value, and what stays of them on their way."""

from __future__ import annotations

import pickle

import pytest

from mrl.errors import (
    MAX_LINE,
    CheckpointError,
    ConfigError,
    MistakeCollector,
    ModelError,
    ServerError,
    UserError,
    first_line,
    quoted,
    show,
)

KEY = "optimizer.min_lr"


@pytest.mark.parametrize(
    "error, line",
    [
        (ConfigError(KEY, 0.1, "is above 0.01", "give at most 0.01"), f"{KEY}: value 0.1 is above 0.01; give at most 0.01"),
        (ConfigError(KEY, None, "is nothing", "give 1"), f"{KEY}: value null is nothing; give 1"),
        (ConfigError(KEY, why="is missing", fix="give a number"), f"{KEY}: is missing; give a number"),
        (ConfigError(KEY, "a\nb", "is text"), f'{KEY}: value "a\\nb" is text'),
        (ModelError("model.path", quoted("x/y"), "is a file", "give a folder"), "model.path: value 'x/y' is a file; give a folder"),
        (ConfigError("a text: of one's own; do this"), "a text: of one's own; do this"),
    ],
)  # fmt: skip
def test_the_line_of_an_error(error, line):
    assert str(error) == line


@pytest.mark.parametrize("kind", [ConfigError, ModelError])
def test_a_value_of_any_length_leaves_room_for_what_would_work(kind):
    error = kind(KEY, {"a": ["x" * 9999] * 99}, "is " + "very " * 200 + "long", "give a number")
    assert len(str(error)) <= kind.longest >= MAX_LINE and str(error).endswith("give a number")


def test_the_first_line_of_another_programs_error():
    assert first_line(ValueError("\n  one \ntwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError(" \n")) == "ValueError"


def test_a_key_below_a_section():
    error = ConfigError("engine.parallel.tp", 3, "does not divide", "use 2").under("critic")
    assert (error.key, error.value, error.why, error.fix) == (
        "critic.engine.parallel.tp",
        3,
        "does not divide",
        "use 2",
    )
    assert str(error) == "critic.engine.parallel.tp: value 3 does not divide; use 2"
    assert ConfigError("a text: of one's own").key is None


def test_a_line_that_goes_on_says_all_that_it_said():
    error = ConfigError(KEY, 0.1, "is above 0.01", "give at most 0.01")
    assert str(error.going_on("nothing was saved")) == f"{error}; nothing was saved"
    assert (error.going_on("nothing was saved").key, error.going_on("more").value) == (KEY, 0.1)
    assert str(UserError("a", why="is b").going_on("c")) == "a: is b; c"
    assert str(UserError("a: text").going_on("c")) == "a: text; c"


@pytest.mark.parametrize(
    "error",
    [
        UserError("a: text"),
        ConfigError(KEY, quoted("x"), "is y", "do z"),
        CheckpointError("x", why="is y"),
        ServerError("a: text", status=404),
    ],
)
def test_fields_come_through_to_other_processes(error):
    """`on_main` raises on every rank what one of them met."""
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
    if error.key is not None:
        assert str(there.under("s")) == f"s.{error}"


def test_all_mistakes_come_through_to_other_processes():
    with pytest.raises(ConfigError) as raised, MistakeCollector() as mistakes:
        for key in ("a", "b", "c"):
            with mistakes.noted():
                raise ConfigError(key, 1, "is wrong", "give 2")
    there = pickle.loads(pickle.dumps(raised.value))
    assert str(there).splitlines() == str(raised.value).splitlines() and len(str(there).splitlines()) == 3
    assert [one.key for one in there.others] == ["b", "c"]


def test_values_as_they_may_have_been_written():
    shown = {None: "null", False: "false", 1.0: "1.0", "a": '"a"', (1, "b"): '[1, "b"]', quoted("a"): "'a'"}
    assert {show(value) for value in shown} == set(shown.values())
    assert len(show("x" * 500)) == 80
