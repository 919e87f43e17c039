"""Operations that a step dispatches on CUDA tensors without memory, at ceilings that only fall (ceilings.json).

The host's time of a step grows with them. A count above its ceiling fails, and so does one below: the ceiling is then
lowered by `python -m tests.cuda counts --lower`.
"""

from __future__ import annotations

import pytest

from tests.cuda import count_cases
from tests.cuda.count_cases import IN_CI, QUICK, ROWS, Counted, Counter, Row
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


def test_what_launches_nothing_is_not_counted(worker):
    """Views, allocations and tensors of the host are not counted. A backward pass is, with what it computes again: one
    of its three products."""
    assert worker.call("tests.cuda.reads:launched") == {
        "forward": {"mm": 1, "sin": 1, "_to_copy": 1},
        "backward": {"ones_like": 1, "mm": 3, "cos": 1, "mul": 1},
    }


def test_figures_are_what_counts_grow_with():
    """Counts of an update are 5 + 7 a layer + 100 a micro-batch + 30 a layer and micro-batch here."""

    def counted(layers: int) -> Counted:
        update = {
            f"{n} micro-batch{'es' * (n > 1)}": Counter(mul=5 + 7 * layers + 100 * n + 30 * layers * n) for n in (1, 2)
        }
        ragged = Counter(mul=5 + 47 * layers, _flash_attention_forward=80 * layers)
        return Counted(update | {"ragged": ragged, "optimizer": Counter(addcmul_=3 + 4 * layers)}, {})

    found = count_cases.figures(Row("dense", "local"), counted(1), counted(2))
    assert found == {
        "layer and micro-batch": 30, "head and micro-batch": 100, "layer": 7, "rest of an update": 5,
        "optimizer, layer": 4, "optimizer, rest": 3, "ragged, layer and micro-batch": 120,
        "ragged, attention of a layer": 80,
    }  # fmt: skip
    assert count_cases.step(found, 20, 4) == 4 * (20 * 30 + 100) + 20 * (7 + 4) + 5 + 3


def test_a_ceiling_falls_and_does_not_rise(tmp_path, monkeypatch):
    monkeypatch.setattr(count_cases, "CEILINGS", tmp_path / "ceilings.json")
    count_cases.CEILINGS.write_text('{"versions": {}, "ceilings": {"dense local": {"layer": 10, "once": 4}}}')
    row, found = Row("dense", "local"), {"layer": 12, "once": 3}
    ceilings = count_cases.read()["ceilings"][str(row)]
    assert [line.split(":")[1] for line in count_cases.above(row, found, ceilings)] == [" layer"]
    assert [line.split(":")[1] for line in count_cases.below(row, found, ceilings)] == [" once"]
    count_cases.lower(row, found)
    assert count_cases.read()["ceilings"] == {"dense local": {"layer": 10, "once": 3}}
