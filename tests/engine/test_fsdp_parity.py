"""Rows of the parity table (tests/engine/parity_rows.py) of the FSDP engine, on 1, 2 and 4 ranks, and of another package's."""

import pytest

from tests.engine.parity_rows import (
    EXTERNAL_ROWS,
    FSDP_LORA_ROWS,
    FSDP_NIGHTLY_LORA_ROWS,
    FSDP_NIGHTLY_ROWS,
    FSDP_ROWS,
    Row,
    first_rows,
    next_rows,
)
from tests.tiers import in_tiers

ROWS = [*FSDP_ROWS, *FSDP_LORA_ROWS, *EXTERNAL_ROWS]
ALL = [*ROWS, *FSDP_NIGHTLY_ROWS, *FSDP_NIGHTLY_LORA_ROWS]


FIRST = first_rows(ROWS)
NIGHTLY = (
    "qwen3_5 long memory", "qwen3_5_moe, dp1", "llama tied, dp1", "llama3 rope", "llama, cp4",
    "llama, dp4, packed, size 1, 3 sequences, replicate 2",
)  # fmt: skip
"""Beginnings of rows whose parts other rows of CI have in another combination."""


def pushed() -> list[Row]:
    """Those of FIRST with a family, a part of a model, a layout or a selection of adapters that none before them has."""
    found, seen = [], set()
    for row in FIRST:
        parts = {*row.model.replace("value head", "value").split(), row.layout, row.lora}
        if parts - seen or row.sequences == 3:
            found.append(row)
        seen |= parts
    return found


CI = [row for row in (*pushed(), *next_rows(ROWS), FSDP_LORA_ROWS[-1]) if not str(row).startswith(NIGHTLY)]


@pytest.mark.parametrize("row", in_tiers(pushed()[::3], CI, ALL), ids=str)
def test_equal_to_hugging_face(table, row):
    table.check(row)
