"""Every row of the parity table within the bounds that tests/engine/parity.py states and explains."""

import pytest

from tests.engine import tiny
from tests.engine.parity import Row, Table
from tests.engine.parity_rows import NIGHTLY_ROWS, ROWS, first_rows, next_rows
from tests.tiers import in_tiers

FIRST = first_rows(ROWS)
FAST = [row for row in FIRST if row.model in tiny.FAMILIES or row.world_size > 1]
"""All but variants of a family on one process."""
SPLIT_ODDLY = [row for row in ROWS if row.why and row.layout in ("tp2", "tp2+sp", "cp2") and row.model != "llama"]
"""Families with a part that no other has and ranks share; other pairs of family and layout are nightly."""


@pytest.mark.parametrize(
    "row", in_tiers(FAST, [*FIRST, *next_rows(ROWS), *SPLIT_ODDLY], (*ROWS, *NIGHTLY_ROWS)), ids=str
)
def test_row(table: Table, row: Row):
    table.check(row)
