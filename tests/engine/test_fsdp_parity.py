"""Rows of the parity table (tests/engine/parity_rows.py) of the FSDP engine, on 1, 2 and 4 ranks, and of another package's."""

import pytest

from tests.engine.parity import Table
from tests.engine.parity_rows import (
    EXTERNAL_ROWS,
    FSDP_LORA_ROWS,
    FSDP_NIGHTLY_LORA_ROWS,
    FSDP_NIGHTLY_ROWS,
    FSDP_ROWS,
    first_rows,
    next_rows,
)
from tests.tiers import in_tiers


@pytest.fixture(scope="module")
def table():
    return Table()


NIGHTLY = [pytest.param(row, marks=pytest.mark.nightly) for row in (*FSDP_NIGHTLY_ROWS, *FSDP_NIGHTLY_LORA_ROWS)]


ROWS = [*FSDP_ROWS, *FSDP_LORA_ROWS, *EXTERNAL_ROWS]


@pytest.mark.parametrize(
    "row", [*in_tiers(first_rows(ROWS)[::3], first_rows(ROWS) + next_rows(ROWS), ROWS), *NIGHTLY], ids=str
)
def test_equal_to_hugging_face(table, row):
    ((_, outcome),) = table.run([row])
    assert not isinstance(outcome, str), outcome
    assert not outcome.problems, outcome.problems
