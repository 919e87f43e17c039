"""Rows of the parity table (tests/engine/parity_rows.py) of the FSDP engine, on 1, 2 and 4 ranks, and of another package's."""

import pytest

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

ROWS = [*FSDP_ROWS, *FSDP_LORA_ROWS, *EXTERNAL_ROWS]
ALL = [*ROWS, *FSDP_NIGHTLY_ROWS, *FSDP_NIGHTLY_LORA_ROWS]


FIRST = first_rows(ROWS)


@pytest.mark.parametrize("row", in_tiers(FIRST[::3], FIRST + next_rows(ROWS, of_models=False), ALL), ids=str)
def test_equal_to_hugging_face(table, row):
    table.check(row)
