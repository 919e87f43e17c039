"""Every row of the parity table within the bounds that tests/engine/parity.py states and explains."""

import pytest

from tests.engine.parity import GRADIENT, LOSS, Row, Table
from tests.engine.parity_rows import NIGHTLY_ROWS, OVER_NCCL, ROWS, SEVERAL_GPUS, first_rows, next_rows
from tests.tiers import in_tiers

PROMISED_LAYOUTS = (
    "tp2", "tp2+sp", "tp4+sp", "pp2", "pp4", "pp2xvpp2", "cp2", "cp4", "dp2", "dp4", "tp2xpp2", "tp2xpp2xdp2", "dp2xep2",
    "tp2+spxdp2xep2xetp2", "tp2+spxcp2xpp2",
)  # fmt: skip
PROMISED_ROWS = (
    *(("llama tied", layout) for layout in ("dp1", "tp2", "pp2", "pp4", "pp2xvpp2", "cp2", "tp2+spxcp2xpp2")),
    ("llama 5 layers", "pp2"), ("llama 5 layers", "pp4"), ("llama 7 layers tied", "pp2xvpp2"),
    ("llama value head", "dp2"), ("llama value head", "tp2+sp"), ("llama tied value head", "pp2"),
    ("qwen3_moe", "dp2xep2"), ("qwen3_moe", "pp2xdp2xep2"), ("mixtral", "dp2xep2"), ("mixtral", "tp2+spxdp2xep2xetp2"),
)  # fmt: skip
"""Model and layout of rows that may not vanish: tied embeddings under each split, uneven pipelines, value heads, experts."""

SPLIT_ODDLY = [row for row in ROWS if row.why and row.layout in ("tp2", "tp2+sp", "cp2") and row.model != "llama"]
"""Families with a part that no other has and ranks share; other pairs of family and layout are nightly."""


@pytest.mark.parametrize("row", in_tiers(first_rows(ROWS), [*next_rows(ROWS), *SPLIT_ODDLY], (*ROWS, *NIGHTLY_ROWS)), ids=str)
def test_row(table: Table, row: Row):
    table.check(row)


def test_the_table_is_what_was_promised():
    rows = (*ROWS, *NIGHTLY_ROWS)
    assert len({str(row) for row in rows}) == len(rows) >= 40
    assert (LOSS, GRADIENT) == (1e-6, 1e-5)
    assert set(PROMISED_LAYOUTS) <= {row.layout for row in rows}
    assert {"llama", "llama3 rope", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"} <= {row.model for row in rows}
    assert {row.packing for row in rows} == {True, False}
    assert {"none", "selective", "full"} == {row.recompute for row in rows}
    assert set(PROMISED_ROWS) <= {(row.model, row.layout) for row in rows}
    assert {"cp2", "dp2", "cp2xpp2"} <= {row.layout for row in rows if row.one_token}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_table_has_rows_with_this_many_micro_batches(count):
    """Of one process, and of ranks that each have a whole mini-batch, where `size` sets the number."""
    rows = [row for row in ROWS if row.size is not None and row.degrees.get("dp", 1) == 1]
    counts = {(row.layout == "dp1", row.sequences // row.size) for row in rows}
    assert {(True, count), (False, count)} <= counts


def test_the_rows_for_several_gpus_are_all_there():
    named = {(model, layout) for model, layouts in OVER_NCCL.items() for layout in layouts}
    assert {(row.model, row.layout) for row in SEVERAL_GPUS} == named
    assert all(row.world_size > 1 for row in SEVERAL_GPUS)
