"""Every row of the parity table within the bounds that tests/engine/parity.py states and explains."""

import pytest

from tests.engine import tiny
from tests.engine.parity import GRADIENT, LOSS, Row, Table
from tests.engine.parity_rows import ALL, CROSSES, NIGHTLY_ROWS, ROWS, first_rows, next_rows
from tests.tiers import in_tiers

FIRST = first_rows(ROWS)
FAST = [row for row in FIRST if row.model in tiny.FAMILIES or row.world_size > 1]
"""All but variants of a family on one process."""
SPLIT_ODDLY = [row for row in ROWS if row.why and row.layout in ("tp2", "tp2+sp", "cp2") and row.model != "llama"]
"""Families with a part that no other has and ranks share; other pairs of family and layout are nightly."""


IN_CI = [*FIRST, *next_rows(ROWS), *SPLIT_ODDLY, *CROSSES]


def test_the_table_is_what_was_promised():
    assert (LOSS, GRADIENT) == (1e-6, 1e-5)
    assert len({str(row) for row in ALL}) == len(ALL) and len(ROWS) >= 100
    layouts = "dp1 tp2 tp2+sp pp2 pp2xvpp2 cp2 dp2 dp2xep2 dp2xetp2 tp4+sp pp4 cp4 dp4 tp2xpp2xdp2 tp2+spxcp2xpp2"
    assert {*layouts.split(), "tp2+spxdp2xep2xetp2", "pp2xdp2xep2", "tp2+spxetp1"} <= {row.layout for row in ROWS}
    of_ci = {(row.packing, row.recompute) for row in (*FAST, *IN_CI) if row.world_size > 1}
    assert of_ci >= {(True, "selective"), (False, "full")}
    assert {"cp2", "dp2", "cp2xpp2"} <= {row.layout for row in (*ROWS, *NIGHTLY_ROWS) if row.one_token}


@pytest.mark.parametrize("row", in_tiers(FAST, IN_CI, (*ROWS, *NIGHTLY_ROWS)), ids=str)
def test_row(table: Table, row: Row):
    table.check(row)
