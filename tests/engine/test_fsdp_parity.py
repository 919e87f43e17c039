"""Rows of the parity table (tests/engine/parity_rows.py) of the FSDP engine, on 1, 2 and 4 ranks, and of another package's."""

import pytest

from tests.engine.parity import Table
from tests.engine.parity_rows import EXTERNAL_ROWS, FSDP_LORA_ROWS, FSDP_ROWS, FSDP_SLOW_LORA_ROWS, FSDP_SLOW_ROWS


@pytest.fixture(scope="module")
def table():
    return Table()


SLOW = [pytest.param(row, marks=pytest.mark.slow) for row in (*FSDP_SLOW_ROWS, *FSDP_SLOW_LORA_ROWS)]


@pytest.mark.parametrize("row", [*FSDP_ROWS, *FSDP_LORA_ROWS, *EXTERNAL_ROWS, *SLOW], ids=str)
def test_equal_to_hugging_face(table, row):
    ((_, outcome),) = table.run([row])
    assert not isinstance(outcome, str), outcome
    assert not outcome.problems, outcome.problems
