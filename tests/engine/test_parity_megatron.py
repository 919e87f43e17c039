"""Every row of the parity table within the bounds that tests/engine/parity.py states and explains."""

import pytest

from tests.engine.parity import GRADIENT, LOSS, Outcome, Row, Table
from tests.engine.parity_rows import ROWS, SLOW_ROWS


@pytest.fixture(scope="session")
def table() -> Table:
    return Table()


def check(table: Table, row: Row) -> None:
    ((_, outcome),) = table.run([row])
    assert isinstance(outcome, Outcome), outcome
    assert not outcome.problems, f"{row}: " + "; ".join(outcome.problems)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(table: Table, row: Row):
    check(table, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_ROWS, ids=str)
def test_slow_row(table: Table, row: Row):
    check(table, row)


def test_the_table_is_what_was_promised():
    rows = (*ROWS, *SLOW_ROWS)
    assert len({str(row) for row in rows}) == len(rows) >= 40
    assert (LOSS, GRADIENT) == (1e-6, 1e-5)
    layouts = {row.layout for row in rows}
    assert {"tp2", "tp2+sp", "tp4+sp", "pp2", "pp4", "pp2xvpp2", "cp2", "cp4", "tp2xpp2", "tp2xpp2xdp2"} <= layouts
    assert {"llama", "llama3 rope", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"} <= {row.model for row in rows}
    assert {row.packing for row in rows} == {True, False}
