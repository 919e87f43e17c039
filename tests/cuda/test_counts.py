"""Operations that a step dispatches on CUDA tensors without memory, at ceilings that only fall (ceilings.json).

The host's time of a step grows with them. A count above its ceiling fails, and so does one below: the ceiling is then
lowered by `python -m tests.cuda counts --lower`.
"""

from __future__ import annotations

import pytest

from tests.cuda import count_cases
from tests.cuda.count_cases import IN_CI, QUICK, ROWS
from tests.tiers import in_tiers

FILE = count_cases.read()


@pytest.mark.skipif(
    count_cases.installed() != FILE["versions"], reason=f"operations are counted with {FILE['versions']}"
)
@pytest.mark.parametrize("row", in_tiers(QUICK, IN_CI, ROWS.values()), ids=str)
def test_operations_are_at_their_ceilings(request, row):
    worker = request.getfixturevalue("te_worker" if row.te else "worker")
    one, two = (worker.call("tests.cuda.counts:count", row, layers) for layers in (1, 2))
    found, ceilings = count_cases.figures(row, one, two), FILE["ceilings"][str(row)]
    assert not count_cases.above(row, found, ceilings) + count_cases.below(row, found, ceilings)


def test_ceilings_are_those_of_the_rows():
    assert FILE["ceilings"].keys() == ROWS.keys()
