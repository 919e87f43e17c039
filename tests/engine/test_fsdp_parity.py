"""The FSDP engine's rows of the parity table (tests/engine/parity_rows.py), on 1, 2 and 4 ranks."""

import pytest

from tests.engine.parity import Table
from tests.engine.parity_rows import FSDP_ROWS, SLOW_FSDP_ROWS, SLOW_ULYSSES_ROWS, ULYSSES_ROWS


@pytest.fixture(scope="module")
def table():
    return Table()


@pytest.mark.parametrize("row", FSDP_ROWS + ULYSSES_ROWS, ids=str)
def test_equal_to_hugging_face(table, row):
    ((_, outcome),) = table.run([row])
    assert not isinstance(outcome, str), outcome
    assert not outcome.problems, outcome.problems


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_FSDP_ROWS + SLOW_ULYSSES_ROWS, ids=str)
def test_slow_rows_equal_to_hugging_face(table, row):
    test_equal_to_hugging_face(table, row)
