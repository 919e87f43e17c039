"""Rows of test_keys_reach.py for the section `teacher`."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.keys import walk_keys
from mrl.config.schema import SFTConfig
from tests.config import looks
from tests.config.reach import DEFAULT, Row

SAME, OTHER = "{inputs}/dense", "{inputs}/other"  # the student of all rows has the weights of the first
IN_ORDER = {"data.shuffle": False}
UNGUARDED = IN_ORDER | {"train.guards": False}  # which a student that is its teacher does not pass
TAUGHT = IN_ORDER | {"teacher.model.path": OTHER, "teacher.top_k": 3}

divergence = looks.metric("distill/divergence")
as_forward_kl, as_beta_half, as_cold = (
    looks.the_same_as_with(divergence, **{key: value})
    for key, value in (("teacher.loss", "forward_kl"), ("teacher.beta", 0.5), ("teacher.temperature", 1.0))
)
as_alone = looks.the_same_as_with(looks.metric("train/loss"), **{"teacher.weight": 1.0})

ON_ANY_BACKEND = [
    Row("teacher.model.path", divergence, [(SAME, [0.0]), (OTHER, pytest.approx([0.5], rel=0.5))], UNGUARDED),
    Row(
        "teacher.model.dtype", lambda run: run.metrics[0]["distill/divergence"] == 0,
        [(DEFAULT, True), ("float32", True), ("bfloat16", False)], UNGUARDED | {"teacher.model.path": SAME},
    ),
    Row(
        "teacher.loss", as_forward_kl,
        [(DEFAULT, True), ("forward_kl", True), ("reverse_kl", False), ("jsd", False)], TAUGHT,
    ),
    Row("teacher.beta", as_beta_half, [(DEFAULT, True), (0.1, False)], TAUGHT | {"teacher.loss": "jsd"}),
    Row("teacher.temperature", as_cold, [(DEFAULT, True), (2.0, False)], TAUGHT),
    Row("teacher.top_k", looks.is_in_metrics("distill/teacher_tail"), [(3, True), (None, False)], TAUGHT),
    Row("teacher.weight", as_alone, [(DEFAULT, True), (0.5, False)], TAUGHT),
    Row(
        "teacher.others", divergence,
        [({"b": {"model": {"path": SAME}}}, [0.0]), ({"b": {"model": {"path": OTHER}}}, pytest.approx([0.5], rel=0.5))],
        UNGUARDED | {"teacher.model.path": OTHER, "data.teacher": "b"},
    ),
    Row(
        "data.teacher", lambda run: run.metrics[0]["distill/divergence"] == 0, [(DEFAULT, False), ("b", True)],
        UNGUARDED | {"teacher.model.path": OTHER, "teacher.others": {"b": {"model": {"path": SAME}}}},
    ),
    Row("teacher.cache", lambda run: "are written to" in run.said, [(DEFAULT, False), (True, True)], TAUGHT),
]  # fmt: skip
ROWS = [dataclasses.replace(row, on=("megatron",)) for row in ON_ANY_BACKEND]

_OF_SERVER = ("url", "name", "concurrency", "timeout_s", "key_variable")
IN_OTHER_TESTS = {
    **{f"teacher.server.{name}": "tests/trainers/test_teacher_server.py" for name in _OF_SERVER},
    **{
        key.path: "tests/config/test_teacher_checks.py"
        for key in walk_keys(SFTConfig)
        if key.path.startswith("teacher.engine.")
    },
}
"""Key -> the test that sees it: a server has a test of its own, and an engine's section is handed over whole."""
