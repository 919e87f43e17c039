"""The FSDP engine's rows of the parity table (tests/engine/parity.py), on 1, 2 and 4 ranks."""

import dataclasses

import pytest

from tests.engine.parity import Row, Table

ROWS = (
    Row("llama", size=4, packing=False),
    Row("llama tied", size=8),
    Row("llama value head", size=4),
    Row("llama3 rope", tokens=64),
    Row("mistral", size=2),
    Row("qwen2 window", tokens=64, packing=False),
    Row("qwen3", tokens=64, recompute="full"),
    Row("qwen3_moe", size=4),
    Row("mixtral", tokens=64),
    Row("llama", "dp2", size=2),
    Row("llama", "dp2", size=1, sequences=3, why="a rank with an empty micro-batch"),
    Row("llama tied", "dp2", tokens=64, packing=False, recompute="full"),
    Row("llama tied value head", "dp2", size=4),
    Row("mistral", "dp2", size=4, packing=False),
    Row("qwen2", "dp2", size=1),
    Row("qwen3_moe step 2", "dp2", size=2),
    Row("mixtral", "dp2", size=4, packing=False),
    Row("llama 5 layers", "dp4", tokens=48),
    Row("llama", "dp4", size=1, sequences=3, why="a rank without any sequence"),
    Row("qwen2", "dp4", size=2, packing=False),
    Row("qwen3 tied", "dp4", size=2),
    Row("qwen3_moe", "dp4", size=1),
)


@pytest.fixture(scope="module")
def table():
    return Table()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equal_to_hugging_face(table, row):
    ((_, outcome),) = table.run([dataclasses.replace(row, backend="fsdp")])
    assert not isinstance(outcome, str), outcome
    assert not outcome.problems, outcome.problems
